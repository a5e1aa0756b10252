"""Finds out what works on this machine: imports frameworks, runs a job with each engine, asks launchers for their versions.

Each probe is a process of its own with a time limit, so an import that hangs does not delay the answer.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

from horovod._base import config
from horovod.runner import children

SECONDS = 5.0
"""The time limit of one probe. A framework that takes longer to import, as on a slow disk, is reported as such."""
JOB_SECONDS = 60.0
"""The time limit of a job. It takes less than one second, unless the machine is busy or reads Python for the first time."""
BACK_ENDS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax[cpu]"}
"""Modules without which a framework may not be imported, and the distribution of each."""


class ProbeResult(NamedTuple):
    """The outcome of a probe."""

    usable: bool
    detail: str
    """A version, or why it cannot be used."""
    remedy: str = ""
    """The command that adds what is missing."""


Probe = Callable[[int], ProbeResult]
"""Called with a descriptor; once that is readable, the probe gives up."""


def run_probes(probes: Mapping[str, Probe]) -> dict[str, ProbeResult]:
    """Run probes at the same time. Returns their results by name. A signal ends them, and is handled afterwards."""

    def run(interrupted: int) -> dict[str, ProbeResult]:
        with ThreadPoolExecutor(len(probes)) as pool:
            started = {name: pool.submit(probe, interrupted) for name, probe in probes.items()}
            while wait(started.values(), children.LONGEST_WAIT_SECONDS).not_done:
                pass
            return {name: future.result() for name, future in started.items()}

    return children.interruptible(run)


_IMPORT = """
import importlib, sys
framework = importlib.import_module(sys.argv[1])
if sys.argv[2]: importlib.import_module(sys.argv[2])
cards = 0
if sys.argv[1] == "torch" and framework.cuda.is_available(): cards = framework.cuda.device_count()
print("found", getattr(framework, "__version__", "of unknown version") + (f", with {cards} GPUs" if cards else ""))
"""


def framework(module: str, binding: str, remedy: str, cancel: int = -1) -> ProbeResult:
    """Import a framework, and Horovod's binding of it."""
    if _spec(module) is None:
        return ProbeResult(False, "not installed", remedy)
    done = _run([sys.executable, "-c", _IMPORT, module, binding], {"TF_CPP_MIN_LOG_LEVEL": "3"}, SECONDS, cancel)
    if done is None:
        return ProbeResult(
            True,
            f"{_installed(module)}; importing it takes more than {SECONDS:g} s here, so the import was not completed",
        )
    found = re.search(r"^found (.*)$", done.output, re.MULTILINE)
    if done.status or found is None:
        reason = _last_line(done)
        return ProbeResult(False, f"installed, and cannot be imported: {reason}", _repair(module, reason, remedy))
    return ProbeResult(True, found[1])


def _repair(module: str, reason: str, remedy: str) -> str:
    """The command that repairs an installed framework that cannot be imported, for the given reason."""
    missing = re.search(r"No module named '(\w+)", reason)
    if missing and missing[1] != module and missing[1] in BACK_ENDS:
        return f"pip install '{BACK_ENDS[missing[1]]}'"
    return f"{remedy} --force-reinstall"


def engine(name: str, cancel: int = -1) -> ProbeResult:
    """Run a job of two ranks that uses this engine."""
    arguments = ["-m", "horovod.runner.launch", "-np", "2", "-H", "localhost:2"]
    arguments += [sys.executable, "-m", "horovod._bindings.trial"]
    done = _run([sys.executable, *arguments], {config.CPU_OPERATIONS: name, config.TIMELINE: ""}, JOB_SECONDS, cancel)
    if done is None:
        return ProbeResult(False, f"a job of two ranks did not end within {JOB_SECONDS:g} seconds")
    if done.status:
        said = re.findall(r"^\[\d+\]<stderr>:(\w[\w.]*(?:Error|Exception|Interrupt): .*)$", done.errors, re.M)
        return ProbeResult(False, f"a job of two ranks failed: {said[0] if said else _last_line(done)}")
    return ProbeResult(True, "a job of two ranks on this host ran with it")


def program(name: str, arguments: Sequence[str], remedy: str, cancel: int = -1) -> ProbeResult:
    """Ask a program for its version with ``arguments``; if these are empty, only look for the program."""
    if shutil.which(name) is None:
        return ProbeResult(False, "not found on the PATH", remedy)
    if not arguments:
        return ProbeResult(True, "found on the PATH")
    done = _run([name, *arguments], {}, SECONDS, cancel)
    if done is None:
        return ProbeResult(False, f"it does not answer within {SECONDS:g} seconds")
    text = done.output + done.errors
    if done.status:
        return ProbeResult(False, f"it fails: {_last_line(done)}")
    return ProbeResult(True, _version(text))


def _version(text: str) -> str:
    hydra = re.search(r"^HYDRA build details:.*?Version:\s*(\S+)", text, re.DOTALL | re.MULTILINE)
    if hydra:
        return f"MPICH {hydra[1]}"
    open_mpi = re.search(r"mpirun \(Open MPI\) (\S+)", text)
    if open_mpi:
        return f"Open MPI {open_mpi[1]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "of unknown version"


class _Said(NamedTuple):
    """How a command ended, and what it wrote."""

    status: int
    output: str
    errors: str


def _run(command: Sequence[str], extra: Mapping[str, str], seconds: float, cancel: int) -> _Said | None:
    """A command's end; None if it does not end in time."""
    # As from an ordinary shell: this process may be a rank of a job, to which the probe does not belong.
    inherited = {
        name: value for name, value in os.environ.items() if name not in (config.RANK, config.SIZE, config.SECRET_KEY)
    }
    try:
        done = children.run(command, seconds, environment={**inherited, **extra}, cancel=cancel)
    except (TimeoutError, children.Cancelled):
        return None
    except children.TooMuchOutput:
        return _Said(1, "", "it writes without end")
    except OSError as error:
        return _Said(127, "", error.strerror or str(error))
    return _Said(done.status, done.output.decode(errors="replace"), done.errors.decode(errors="replace"))


def _last_line(said: _Said) -> str:
    lines = [line.strip() for line in (said.errors or said.output).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {said.status}"


def _installed(module: str) -> str:
    for distribution in (module, f"{module}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pass
    return "installed"


def _spec(module: str) -> object:
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None
