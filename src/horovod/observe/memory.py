"""Whether the system has ended processes because memory ran out, and which system this is."""

from __future__ import annotations

from pathlib import Path

_COUNTS = (
    Path("/proc/vmstat"),
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
"""Where the kernel counts them: of the whole system, and of this process's control group, by its two interfaces."""


def processes_killed() -> int:
    """How many processes the kernel has ended for lack of memory until now; -1 where it does not tell."""
    counts = [_count(path) for path in _COUNTS]
    return max(counts)


def _count(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return -1


def boot_id() -> str:
    """Names the running system; "" if it has no such name. All its processes share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
