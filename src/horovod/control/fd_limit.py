"""Raises this process's limit on open files as far as its part of a job needs, and keeps that from the programs it starts."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

_log = logging.getLogger("horovod.control")

_OTHER_FILES = 64
"""Descriptors for everything else that the process opens: its engines' memory, connections in their handshake, pipes."""
_raised: tuple[int, int] | None = None
"""The soft limit before the first call of :func:`make_room` that raised it, and after the last one."""


class DescriptorLimitError(RuntimeError):
    """The hard limit on open files is too low; the message says what needs more files, and how to raise the limit."""


def make_room(files: int, purpose: str, kind: str = "connections") -> None:
    """Raise the soft limit so that this number of files can be opened.

    Half of the present soft limit remains free for the script. Repeated calls raise the limit to at most twice what the process
    needs. A process that opens few files keeps its limit: ``select()`` does not work with large descriptors, and programs
    that close all possible descriptors become slow.

    Args:
        files: how many connections, pipes or other files will be opened.
        purpose, kind: what needs them, and what they are, for the error.

    Raises:
        DescriptorLimitError: the hard limit is too low. Nothing was opened.
    """
    global _raised
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    used = open_descriptors()
    needed = used + files + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise DescriptorLimitError(
            f"{purpose} needs {files:,} {kind}. This process has {used:,} files open and may open {hard:,}, but "
            f"needs {needed:,}. Raise the hard limit on every host before the job starts: as root, `ulimit -Hn "
            f"{needed}` in the shell that starts it, or a line `* hard nofile {needed}` in /etc/security/limits.conf; "
            f"`docker run --ulimit nofile={needed}` for containers; LimitNOFILE={needed} for the service that starts it"
        )
    wanted = used + files + max(_OTHER_FILES, soft // 2)
    if wanted > soft:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        first = soft if _raised is None or _raised[1] != soft else _raised[0]  # another number was set by the script
        _raised = first, limit
        _log.debug("raised the limit on open files from %d to %d: %s needs %d %s", soft, limit, purpose, files, kind)


def limit_of_programs() -> Callable[[], None] | None:
    """What a new process calls before it runs a program (``preexec_fn``), so that the program has the soft limit from before
    :func:`make_room`; None if the limit is that one. It is one call of the kernel and runs no Python code: other threads may
    hold locks while the process is forked.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _raised is None or _raised[1] != soft:
        return None
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (_raised[0], hard))


def open_descriptors() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # without the descriptor that reads the folder
