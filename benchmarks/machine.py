"""What the figures were measured on: the machine in words."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

LOOKS = 10
"""How many seconds the other work on the machine is looked at: a brief blip does not spoil a record, lasting work does."""
IDLE_PERCENT = 1.0
BUSY_PERCENT = 5.0
"""More than so much other work spoils a measurement."""
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras"}


def describe(frameworks: Sequence[str] = ("torch",)) -> dict[str, str | int | float]:
    """The machine and the versions, for the head of a table and for the record.

    Looks for one to ten seconds how busy the machine is with other work, so call it before starting any, and while no other
    rank works.

    Args:
        frameworks: packages whose versions matter; they are not imported.
    """
    distributions = importlib.metadata.packages_distributions()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{each: importlib.metadata.version(distributions[each][0]) for each in frameworks},
        "numpy": np.__version__,
        "horovod": importlib.metadata.version("horovod"),
        "busy_percent": _busy_percent(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def in_words(machine: dict[str, str | int | float]) -> str:
    busy = f"; BUSY: {machine['busy_percent']} % with other work" if is_busy(machine) else ""
    frameworks = "".join(f", {name} {machine[each]}" for each, name in FRAMEWORKS.items() if each in machine)
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gigabytes']} GB; "
        f"Horovod {machine['horovod']}, Python {machine['python']}{frameworks}; {machine['date']}{busy}"
    )


def is_busy(machine: dict[str, str | int | float]) -> bool:
    """Whether other work was going on, so that the figures are not to be published."""
    return float(machine["busy_percent"]) > BUSY_PERCENT


def _busy_percent() -> float:
    """The share of the processors' time that went to other work: the least of ten seconds, or that of the first idle one."""
    least = 100.0
    for _ in range(LOOKS):
        least = min(least, psutil.cpu_percent(interval=1.0))
        if least < IDLE_PERCENT:
            break
    return least


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
