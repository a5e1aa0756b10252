"""Whether another process on this host runs, is stopped, or has ended. Needs no cooperation of that process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

KILLED = "its process ended without hvd.shutdown(): it crashed, was killed, or its host went away"
STOPPED = "it no longer answers: its process is stopped (SIGSTOP, Ctrl-Z)"


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
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return KILLED if Path("/proc/self").exists() else None
    except OSError:
        return None
    if state in (b"Z", b"X"):
        return KILLED
    return STOPPED if state == b"T" else ""  # "t" where a debugger has stopped it


def ended(processes: Mapping[int, int]) -> list[int]:
    """The ranks whose processes have ended.

    Args:
        processes: ids of processes that this one can see, by rank.
    """
    return [rank for rank, pid in processes.items() if why_not_running(pid) == KILLED]
