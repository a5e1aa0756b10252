"""Shared by the sending and the receiving half of a mailbox: the selector, and the reaction to the end of a connection."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from horovod.control.channel import Channel
from horovod.core.errors import MismatchError
from horovod.core.requests.handle import Handle


class Wire:
    """The connections of a mailbox.

    Args:
        lost: called with a rank and the reason when a connection has ended on which messages were under way.

    Attributes:
        orphans: handles of such messages. They fail with the job, whose end is near.
    """

    def __init__(self, lost: Callable[[int, str], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self.orphans: list[Handle] = []
        self._lost = lost

    def add(self, channel: Channel, serve: Callable[[int], None]) -> None:
        """Have ``serve`` called with the events of a connection."""
        self.selector.register(channel.socket, selectors.EVENT_READ, serve)

    def watch(self, channel: Channel) -> None:
        """Wait for room in the socket, if something waits to be sent. After each send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
        key = self.selector.get_key(channel.socket)
        if key.events != events:
            self.selector.modify(channel.socket, events, key.data)

    def drop(self, channel: Channel, rank: int, reason: str, handles: list[Handle]) -> None:
        """Close a connection that has ended, on which the messages of ``handles`` were under way."""
        self.selector.unregister(channel.socket)
        channel.close()
        if handles:
            self.orphans += handles
            self._lost(rank, reason)


def message_error(error: str) -> MismatchError | None:
    """The error of a message that does not fit; None for ""."""
    return MismatchError(error, reason=error) if error else None


def is_local(connection: socket.socket) -> bool:
    """Whether a connection is one between processes of this host."""
    return connection.family == socket.AF_UNIX
