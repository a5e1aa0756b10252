"""How many files the launcher and its agents open for a job. Their soft limit is raised before they open them."""

from __future__ import annotations

from horovod.control import fd_limit
from horovod.runner.errors import LaunchError

PROCESS = 4
"""A process of this host: its three streams, and the descriptor that tells of its end."""
HOST = 4
"""Another host: the three streams of the program that reaches it, and its agent's connection to the rendezvous server."""
RANK = 3
"""A rank on any host: its connection to the rendezvous server, and the two files of its output."""


def make_room(files: int, purpose: str) -> None:
    """Raise this process's soft limit so that ``files`` more can be opened for ``purpose``.

    Raises:
        LaunchError: the hard limit is too low.
    """
    try:
        fd_limit.make_room(files, purpose, "open files")
    except fd_limit.DescriptorLimitError as error:
        raise LaunchError(str(error)) from None
