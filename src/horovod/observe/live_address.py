"""The address at which rank 0 of a running job answers the live view, and the jobs of this user on this host."""

from __future__ import annotations

import os
from pathlib import Path

from horovod._base.abstract_names import drawn, listed

ADDRESS = "horovod-live"


def new_name(pid: int) -> str:
    """A name for the socket at which the process of rank 0 answers."""
    return drawn(f"{ADDRESS}-{os.getuid()}-{pid}")


def names_of(pid: int) -> list[str]:
    """The sockets that may be the one at which a process answers. Another user may have made some of them."""
    return listed(f"{ADDRESS}-{os.getuid()}-{pid}")


def listening() -> list[int]:
    """The processes of this user on this host that are rank 0 of a running job."""
    found = {name.rpartition(".")[0].rpartition("-")[2] for name in listed(f"{ADDRESS}-{os.getuid()}-", "")}
    return sorted(int(each) for each in found if each.isdigit() and _is_own(int(each)))


def _is_own(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False  # another user has chosen that name


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
