"""The selector that both halves of a mailbox share, and the reaction to the end of a connection."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator

from horovod.control.channel import Channel
from horovod.core.errors import MismatchError
from horovod.core.requests.handle import Handle


class Wire:
    """The connections of a mailbox.

    Args:
        lost: called with a rank and the reason when a connection ends while messages on it are pending.

    Attributes:
        selector: the selector of the mailbox's thread.
        orphans: the handles of such messages. They fail when the runtime ends, which it will: a rank has failed or left.
        sent, arrived: by rank, how many messages of the protocol were handed to the connections with it, and came from them.
    """

    def __init__(self, lost: Callable[[int, str], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self.orphans: list[Handle] = []
        self.sent: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self._lost = lost

    def add(self, channel: Channel, serve: Callable[[int], None]) -> None:
        """Call ``serve`` with the events of a connection from now on."""
        self.selector.register(channel.socket, selectors.EVENT_READ, serve)

    def send(self, channel: Channel, rank: int, body: bytes) -> None:
        """Send a message of the protocol. Raises ChannelClosed."""
        self.sent[rank] = self.sent.get(rank, 0) + 1
        channel.send(body)
        self.watch(channel)

    def receive(self, channel: Channel, rank: int) -> Iterator[bytes]:
        """The messages that have arrived on a connection. Raises ChannelClosed."""
        for body in channel.receive():
            self.arrived[rank] = self.arrived.get(rank, 0) + 1
            yield body

    def watch(self, channel: Channel) -> None:
        """Wait for room in the socket if data waits to be sent. Call this after each send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
        key = self.selector.get_key(channel.socket)
        if key.events != events:
            self.selector.modify(channel.socket, events, key.data)

    def drop(self, channel: Channel, rank: int, reason: str, handles: list[Handle]) -> None:
        """Close a connection that has ended. ``handles`` are those of the messages that were pending on it."""
        self.selector.unregister(channel.socket)
        channel.close()
        if handles:
            self.orphans += handles
            self._lost(rank, reason)


def message_error(error: str) -> MismatchError | None:
    """The error of a message that does not fit its receive; None if ``error`` is empty."""
    return MismatchError(error, reason=error) if error else None


def is_local(connection: socket.socket) -> bool:
    """Whether both ends of a connection are on this host."""
    return connection.family == socket.AF_UNIX
