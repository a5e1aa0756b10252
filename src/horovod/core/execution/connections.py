"""A worker thread's control connections, and the bell that wakes its thread: what is ready to be read, and what is
still to be sent."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.wakeup import WakeUp


class ReadyConnections(NamedTuple):
    """What a look has found.

    Attributes:
        readable, writable: by member index.
        rung: somebody has rung the bell.
    """

    readable: Collection[int] = ()
    writable: Collection[int] = ()
    rung: bool = False


NOTHING = ReadyConnections()


class Connections:
    """The channels of one worker thread, by member index.

    :meth:`look` and :meth:`listen` are for the worker thread, :meth:`ring` is for any, and all else for whoever takes a turn.
    Every kind of waiting has an object of its own, because two threads may not wait on the same one.
    """

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = dict(channels)
        self._bell = WakeUp()
        self._all, self._only_bell, self._only_channels = select.poll(), select.poll(), select.poll()
        self._all.register(self._bell, select.POLLIN)
        self._only_bell.register(self._bell, select.POLLIN)
        self._members: dict[int, int] = {}
        for member, channel in self._channels.items():
            self._all.register(channel, select.POLLIN)
            self._only_channels.register(channel, select.POLLIN)
            self._members[channel.fileno()] = member

    def __contains__(self, member: int) -> bool:
        return member in self._channels

    def members(self) -> list[int]:
        """Whose connections are still of use."""
        return list(self._channels)

    def ring(self) -> None:
        """Wake the worker thread; does nothing after :meth:`close`."""
        self._bell.set()

    def look(self, milliseconds: float | None) -> ReadyConnections:
        """Wait for anything, the bell included, for so long at most; None: without end."""
        found = self._all.poll(milliseconds)
        if not found:
            return NOTHING
        rung, bell = False, self._bell.fileno()
        readable, writable = [], []
        for descriptor, events in found:
            if descriptor == bell:
                self._bell.clear()
                rung = True
                continue
            member = self._members.get(descriptor)
            if member is None:
                continue  # dropped meanwhile
            if events & select.POLLOUT:
                writable.append(member)
            if events & ~select.POLLOUT:
                readable.append(member)
        return ReadyConnections(readable, writable, rung)

    def listen(self, milliseconds: float) -> bool:
        """Wait for the bell alone; it goes on ringing until :meth:`look` has heard it."""
        return bool(self._only_bell.poll(milliseconds))

    def arrivals(self, milliseconds: float) -> ReadyConnections:
        """Wait for messages alone."""
        found = self._only_channels.poll(milliseconds)
        return ReadyConnections([self._members[descriptor] for descriptor, _ in found]) if found else NOTHING

    def receive(self, member: int) -> list[bytes]:
        """The messages that have come from a member. Raises :class:`ChannelClosed`."""
        return self._channels[member].receive()

    def send(self, member: int, body: bytes) -> None:
        """Send a message, or queue what does not fit; in vain if the connection is gone."""
        channel = self._channels.get(member)
        if channel is None:
            return
        try:
            channel.send(body)
        except ChannelClosed:
            return  # what the other side said before it closed, perhaps Stop, is still to be read; then comes its end
        if channel.wants_write:
            self._all.modify(channel, select.POLLIN | select.POLLOUT)

    def flush(self, member: int) -> None:
        """Send what was queued, as far as it goes now."""
        channel = self._channels[member]
        try:
            channel.flush()
        except ChannelClosed:
            channel.discard()  # as in send
        if not channel.wants_write:
            self._all.modify(channel, select.POLLIN)

    def flush_all(self, seconds: float) -> None:
        """Get everything out that is queued, within so many seconds: for the last words, after which nobody looks any more."""
        deadline = time.monotonic() + seconds
        for member, channel in self._channels.items():
            while channel.wants_write and time.monotonic() < deadline:
                poll = select.poll()
                poll.register(channel, select.POLLOUT)
                poll.poll(max(0.0, (deadline - time.monotonic()) * 1000))
                self.flush(member)

    def unsent(self) -> bool:
        """Whether something is queued."""
        return any(channel.wants_write for channel in self._channels.values())

    def drop(self, member: int) -> bool:
        """Stop listening to a member and close its connection; False if that was done before."""
        channel = self._channels.pop(member, None)
        if channel is None:
            return False
        self._all.unregister(channel)
        self._only_channels.unregister(channel)
        del self._members[channel.fileno()]
        channel.close()
        return True

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return [*(channel.fileno() for channel in self._channels.values()), *self._bell.descriptors()]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._bell.close()
