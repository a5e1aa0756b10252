"""Whether another process on this host runs, is stopped, or has ended. Needs no cooperation of that process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

KILLED = "its process ended without hvd.shutdown(): it crashed, was killed, or its host went away"
STOPPED = "it does not answer any more: its process is stopped (SIGSTOP, Ctrl-Z)"


def own_process_namespace() -> str:
    """Identifies this process's namespace: processes with the same result can inspect each other by process id. "" if unknown.

    The text consists of the kernel's boot id and of the process id namespace. Each container usually has its own namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def why_not_running(pid: int) -> str | None:
    """Why process ``pid`` cannot answer, or "" if it runs; None if that is not known.

    A process that a debugger or profiler has stopped counts as running.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return KILLED
    except psutil.Error:
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return KILLED
    return STOPPED if status == psutil.STATUS_STOPPED else ""


def ended(processes: Mapping[int, int]) -> list[int]:
    """The ranks whose processes have ended.

    Args:
        processes: ids of processes that this one can see, by rank.
    """
    return [rank for rank, pid in processes.items() if why_not_running(pid) == KILLED]
