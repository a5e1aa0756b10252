"""A worker's control connections to other members, and the wake-up of its thread."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.sealing import Message
from horovod.control.wakeup import WakeUp


class ReadyConnections(NamedTuple):
    """The result of a poll.

    Attributes:
        readable, writable: by member index.
        woken: another thread has called :meth:`Connections.wake`.
    """

    readable: Collection[int] = ()
    writable: Collection[int] = ()
    woken: bool = False


NOTHING = ReadyConnections()


class Connections:
    """The channels of one worker, by member index.

    :meth:`poll` and :meth:`poll_wake_up` are for the worker thread, :meth:`wake` is for any thread, and everything else is for
    the thread that drives the worker. Each kind of wait has a separate poll object, because two threads must not wait on one
    object.
    """

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = dict(channels)
        self._wake_up = WakeUp()
        self._wake_up_descriptor = self._wake_up.fileno()
        self._poll_all, self._poll_wake_up, self._poll_channels = select.poll(), select.poll(), select.poll()
        self._poll_all.register(self._wake_up, select.POLLIN)
        self._poll_wake_up.register(self._wake_up, select.POLLIN)
        self._members: dict[int, int] = {}
        self._unsent: set[int] = set()
        for member, channel in self._channels.items():
            self._poll_all.register(channel, select.POLLIN)
            self._poll_channels.register(channel, select.POLLIN)
            self._members[channel.fileno()] = member

    def __contains__(self, member: int) -> bool:
        return member in self._channels

    def members(self) -> list[int]:
        """The members whose connections have not been dropped."""
        return list(self._channels)

    def wake(self) -> None:
        """Wake the worker thread; does nothing after :meth:`close`."""
        self._wake_up.set()

    def poll(self, milliseconds: float | None) -> ReadyConnections:
        """Wait for messages, for space to send and for a wake-up, at most ``milliseconds``; None: no limit."""
        found = self._poll_all.poll(milliseconds)
        if not found:
            return NOTHING
        woken = False
        readable, writable = [], []
        for descriptor, events in found:
            if descriptor == self._wake_up_descriptor:
                self._wake_up.clear()
                woken = True
                continue
            member = self._members.get(descriptor)
            if member is None:
                continue  # dropped meanwhile
            if events & select.POLLOUT:
                writable.append(member)
            if events & ~select.POLLOUT:
                readable.append(member)
        return ReadyConnections(readable, writable, woken)

    def poll_wake_up(self, milliseconds: float) -> bool:
        """Wait for a wake-up alone. It remains set until :meth:`poll` has seen it."""
        return bool(self._poll_wake_up.poll(milliseconds))

    def poll_messages(self, milliseconds: float) -> ReadyConnections:
        """Wait for messages alone."""
        found = self._poll_channels.poll(milliseconds)
        return ReadyConnections([self._members[descriptor] for descriptor, _ in found]) if found else NOTHING

    def receive(self, member: int) -> list[bytes]:
        """The messages that a member has sent. Raises :class:`ChannelClosed`."""
        return self._channels[member].receive()

    def send(self, member: int, body: bytes | Message) -> None:
        """Send a message, or queue what does not fit into the socket. Does nothing if the connection is closed."""
        channel = self._channels.get(member)
        if channel is None:
            return
        try:
            channel.send(body)
        except ChannelClosed:
            return  # a Stop that the peer sent before it closed may still have to be read
        if channel.wants_write:
            self._unsent.add(member)
            self._poll_all.modify(channel, select.POLLIN | select.POLLOUT)

    def flush(self, member: int) -> None:
        """Send as much of what is queued as the socket takes."""
        channel = self._channels[member]
        try:
            channel.flush()
        except ChannelClosed:
            channel.discard()  # as in send()
        if not channel.wants_write:
            self._unsent.discard(member)
            self._poll_all.modify(channel, select.POLLIN)

    def flush_all(self, seconds: float) -> None:
        """Send everything that is queued, within ``seconds``. For the last messages, after which no thread polls any more."""
        self.flush_some(self._channels, seconds)

    def flush_some(self, members: Collection[int], seconds: float) -> bool:
        """Send what is queued for some members, within ``seconds``; whether all of it is sent."""
        deadline = time.monotonic() + seconds
        while waiting := [member for member in self._unsent if member in members]:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for member in waiting:
                poll.register(self._channels[member], select.POLLOUT)
            for descriptor, _ in poll.poll(left * 1000):
                self.flush(self._members[descriptor])
        return True

    def unsent(self) -> bool:
        """Whether anything is queued."""
        return bool(self._unsent)

    def drop(self, member: int) -> bool:
        """Close the connection to a member; False if that was done before."""
        channel = self._channels.pop(member, None)
        if channel is None:
            return False
        self._unsent.discard(member)
        self._poll_all.unregister(channel)
        self._poll_channels.unregister(channel)
        del self._members[channel.fileno()]
        channel.close()
        return True

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [*(channel.fileno() for channel in self._channels.values()), *self._wake_up.descriptors()]

    def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            channel.close()
        self._wake_up.close()
