"""What one process can see of another on its host: whether it runs, is stopped, or is gone. Needs nothing of the other."""

from __future__ import annotations

from pathlib import Path

import psutil

KILLED = "its process ended without hvd.shutdown(): it crashed, was killed, or its host went away"
STOPPED = "it does not answer any more: its process is stopped (SIGSTOP, Ctrl-Z)"


def own_process_namespace() -> str:
    """Processes that return the same see one another by their process ids; "" if this one is not known to see any.

    On Linux, the host since it was started last, and the process id namespace (a container mostly has its own).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def why_not_running(pid: int) -> str | None:
    """Why this process cannot answer, or "" if it runs; None if that cannot be found out.

    A process that a debugger or profiler holds up counts as running: that was somebody's intention, and mostly ends soon.
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
