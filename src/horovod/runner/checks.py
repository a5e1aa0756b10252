"""Checks of a request, its environment and the launcher's host before a job is made. Starts nothing."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod.runner.errors import UsageError
from horovod.runner.hosts.slots import MOST_RANKS, HostInfo
from horovod.runner.machine import is_local


def check_entry_point() -> None:
    """Check that PyTorch, when it is imported, will find the entry point by which Horovod replaces a back end.

    Raises:
        ValueError: it will not.
    """
    from importlib.metadata import entry_points  # it imports much

    if not entry_points(group="torch.backends", name="horovod"):
        raise UsageError(
            "--torch-backend: this installation of Horovod has no entry point for PyTorch, probably because it is older than "
            "this flag. Install Horovod again: pip install '.[torch]', in the folder of Horovod's repository"
        )


def check_autotuning(program: str, environment: Mapping[str, str]) -> None:
    """Check that ranks that run this Python can search for settings: one error replaces the same error from every rank.

    Raises:
        ValueError: they cannot. The Python of other environments and hosts is not known here; ``init()`` checks it there.
    """
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None or Path(found).parent != Path(sys.executable).parent:
        return
    from horovod.autotune.search import why_not

    if reason := why_not():
        raise UsageError(f"--autotune: {reason}")


def number_of_ranks(asked: int | None) -> int:
    if asked is None:
        raise UsageError("the number of ranks is missing: give it with -np, as in -np 2")
    if not hasattr(asked, "__index__"):
        raise UsageError(f"the number of ranks must be a whole number, not {asked!r}")
    if not 1 <= asked <= MOST_RANKS:
        raise UsageError(f"the number of ranks must be at least 1 and at most {MOST_RANKS}, not {asked}")
    return asked


def batch_job(environment: Mapping[str, str]) -> str:
    job = environment.get("SLURM_JOB_ID")
    return f"Slurm's job {job}" if job else ""


def is_here(host: HostInfo, environment: Mapping[str, str]) -> bool:
    """Whether the launcher runs on this host, as the user that the host was given with."""
    if host.user:
        return False
    if host.hostname == environment.get("SLURMD_NODENAME"):
        return True  # Slurm's name for it, which may not resolve
    try:
        return is_local(host.hostname)
    except OSError:
        return False  # a name that only ssh knows, or an unknown one, which ssh reports


def with_absolute_python_path(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, with absolute paths in PYTHONPATH: agents on other hosts start in another folder."""
    found = environment.get("PYTHONPATH", "")
    parts = found.split(os.pathsep)
    if not found or all(Path(part).is_absolute() for part in parts):
        return environment
    from horovod.runner.reach.reach import working_directory  # costs time, which jobs on one host need not spend

    directory = Path(working_directory(environment))
    return {**environment, "PYTHONPATH": os.pathsep.join(str(directory / part) for part in parts)}


def check_interfaces(nics: Sequence[str]) -> None:
    known = {name for _, name in socket.if_nameindex()}
    for nic in nics:
        if nic not in known:
            raise UsageError(f"there is no network interface {nic} here; there are {', '.join(sorted(known))}")


def check_program(program: str, environment: Mapping[str, str]) -> None:
    """Check that a program can be run: one error before the start replaces the same error from every rank.

    Raises:
        ValueError: the program is not found, or is not executable.
    """
    if shutil.which(program, path=environment.get("PATH")) is not None:
        return
    if program.endswith(".py") and Path(program).is_file():
        hint = f"; did you mean `{Path(sys.executable).name} {program}`?"
    elif len(program.split()) > 1:
        hint = f"; write it without quotes: {program}"
    else:
        hint = ""
    if Path(program).is_dir() and os.sep in program:
        raise UsageError(f"command is a directory: {program}")
    if os.sep not in program or not os.access(program, os.F_OK):
        raise UsageError(f"command not found: {program or repr(program)}{hint}")
    raise UsageError(f"command is not executable: {program}{hint}")
