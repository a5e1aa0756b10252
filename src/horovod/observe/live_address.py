"""The address at which rank 0 of a running job answers the live view, and the jobs of this user on this host."""

from __future__ import annotations

import os
from pathlib import Path

ADDRESS = "horovod-live"


def socket_name(pid: int) -> str:
    """The abstract Unix socket at which the process of rank 0 answers; it leaves no file behind."""
    return f"\0{ADDRESS}-{os.getuid()}-{pid}"


def listening() -> list[int]:
    """The processes of this user on this host that are rank 0 of a running job."""
    prefix = f"@{ADDRESS}-{os.getuid()}-"
    with Path("/proc/net/unix").open(encoding="utf-8", errors="replace") as table:
        names = {columns[7] for line in table if len(columns := line.split()) > 7}
    return sorted(
        int(name.removeprefix(prefix)) for name in names if name.startswith(prefix) and name[len(prefix) :].isdigit()
    )


def ancestors(pid: int) -> list[int]:
    """A process, its parent, and so on."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found
