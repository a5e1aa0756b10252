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

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras"}


def describe(frameworks: Sequence[str] = ("torch",)) -> dict[str, str | int | float]:
    """The machine and the versions, for the head of a table and for the record.

    Looks for a second how busy the machine is with other work, so call it before starting any.

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
        "busy_percent": psutil.cpu_percent(interval=1.0),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def in_words(machine: dict[str, str | int | float]) -> str:
    busy = f"; BUSY: {machine['busy_percent']} % with other work" if float(machine["busy_percent"]) > 5 else ""
    frameworks = "".join(f", {name} {machine[each]}" for each, name in FRAMEWORKS.items() if each in machine)
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gigabytes']} GB; "
        f"Horovod {machine['horovod']}, Python {machine['python']}{frameworks}; {machine['date']}{busy}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
