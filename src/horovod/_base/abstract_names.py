"""Names of abstract Unix sockets, which leave no file behind.

Every local user can bind every free name. So names end in drawn characters, which no process can take first, and a process
that looks for a socket tries each that begins as it should. Both ends check that the other one runs as the same user
(:func:`horovod.control.connection.is_same_user`).
"""

from __future__ import annotations

import secrets
from pathlib import Path


def drawn(name: str) -> str:
    """A new name that begins with ``name``. It starts with NUL, as the kernel wants it."""
    return f"\0{name}.{secrets.token_hex(8)}"


def listed(name: str, rest: str = ".") -> list[str]:
    """The names that were made of ``name`` by :func:`drawn` and are in use on this host; with ``rest=""`` also those that were
    made of longer names."""
    prefix = f"@{name}{rest}"
    with Path("/proc/net/unix").open(encoding="utf-8", errors="replace") as table:
        found = {columns[7] for line in table if len(columns := line.split()) > 7}
    return ["\0" + each[1:] for each in sorted(found) if each.startswith(prefix)]
