"""Writes files that appear in one step: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def write(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file, in place of an ordinary file that stands there. A symbolic link stays, and its target is written.

    Args:
        private: only this user can read the file.

    Raises:
        OSError: it cannot be written, or something other than a file stands there: a device, a socket, a folder.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "it is not an ordinary file", str(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
