"""Chooses the rank that reads the launcher's standard input, so that ``pdb`` and ``input()`` work in it. Others read nothing.

A rank on this host inherits the descriptor itself, so nothing is read that the rank does not ask for. The rank has a session of
its own, in which a terminal is an ordinary file: line editing works, but Ctrl-C and Ctrl-Z reach the launcher. For a rank on
another host the launcher reads standard input and forwards it, and reads more only when the rank has taken all of it.
"""

from __future__ import annotations

import os

from horovod.runner.agent.base import Agent
from horovod.runner.agent.messages import CHUNK_BYTES
from horovod.runner.errors import UsageError
from horovod.runner.event_loop import Loop

NO_RANK = -1
"""``--stdin none``."""


def choose_reader(asked: int | None, size: int) -> int | None:
    """The rank that reads standard input, or None.

    Args:
        asked: the rank that the user gave, ``NO_RANK``, or None if the user gave none. Then only a job of one rank has a
            reader.
        size: how many ranks there are.

    Raises:
        ValueError: there is no such rank.
    """
    if asked is None:
        return 0 if size == 1 else None
    if asked == NO_RANK:
        return None
    if asked >= size:
        raise UsageError(f"--stdin {asked}: the last of {size} rank{'s' * (size > 1)} is rank {size - 1}")
    return asked


def is_terminal() -> bool:
    return os.isatty(0)


def in_background() -> bool:
    """Whether standard input is a terminal in which this process runs in the background: there the shell reads it."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False  # not the terminal that controls this process: no shell reads there


class Forwarder:
    """Sends this process's standard input to a rank, one piece each time the rank asks."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def pass_on(self, agent: Agent, process: int) -> None:
        """Send the next piece, or the end, as soon as there is one."""

        def read() -> None:
            self.stop()
            try:
                data = os.read(0, CHUNK_BYTES)
            except OSError:
                data = b""  # the terminal is gone: end of input
            agent.feed(process, data)

        try:
            self._loop.watch(0, read)
        except PermissionError:  # an ordinary file: always ready
            read()

    def stop(self) -> None:
        if self._loop.watches(0):
            self._loop.unwatch(0)
