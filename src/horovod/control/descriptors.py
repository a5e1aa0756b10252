"""Raises this process's limit on open files as far as the job's connections need."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

_log = logging.getLogger("horovod.control")

_OTHER_FILES = 64
"""Descriptors for everything else that the process opens: its engines' memory, connections in their handshake, pipes."""


class DescriptorLimitError(RuntimeError):
    """The hard limit on open files is too low; the message says what needs more files, and how to raise the limit."""


def make_room(connections: int, purpose: str) -> None:
    """Raise the soft limit so that this number of connections can be opened.

    Half of the present soft limit remains free for the script. Repeated calls raise the limit to at most twice what the process
    needs. A process that opens few connections keeps its limit: ``select()`` does not work with large descriptors, and programs
    that close all possible descriptors become slow.

    Args:
        connections: how many connections will be opened.
        purpose: what needs them, for the error.

    Raises:
        DescriptorLimitError: the hard limit is too low. Nothing was opened.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    used = open_descriptors()
    needed = used + connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise DescriptorLimitError(
            f"{purpose} needs {connections:,} connections. This process has {used:,} files open and may open {hard:,}, but "
            f"needs {needed:,}. Raise the hard limit on every host before the job starts: as root, `ulimit -Hn "
            f"{needed}` in the shell that starts it, or a line `* hard nofile {needed}` in /etc/security/limits.conf; "
            f"`docker run --ulimit nofile={needed}` for containers; LimitNOFILE={needed} for the service that starts it"
        )
    wanted = used + connections + max(_OTHER_FILES, soft // 2)
    if wanted > soft:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _log.debug(
            "raised the limit on open files from %d to %d: %s needs %d connections", soft, limit, purpose, connections
        )


def open_descriptors() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # without the descriptor that reads the folder
