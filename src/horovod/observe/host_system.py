"""Whether the system has killed processes because memory ran out, and an identifier of this system."""

from __future__ import annotations

from pathlib import Path

_COUNTS = (
    Path("/proc/vmstat"),
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
"""The kernel's counters: of the whole system, and of this process's control group, in versions 2 and 1."""


def processes_killed() -> int:
    """How many processes the kernel has killed so far because memory ran out; -1 if that is not known."""
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
    """Identifies the running system; "" if that is not known. All its processes share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
