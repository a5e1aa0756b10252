"""The receiving half of a mailbox: connections from the ranks that send to this one, and their messages.

All functions run on the thread that serves the mailbox's connections.
"""

from __future__ import annotations

import selectors
from dataclasses import dataclass, field

import msgspec
import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.shm import cross_memory
from horovod.comm.spans import address_of
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from horovod.core.negotiation.agreement import list_ranks
from horovod.core.requests.handle import Handle
from horovod.torch.distributed.point_to_point.matching import Matching, ReceiveFilter
from horovod.torch.distributed.point_to_point.messages import (
    Ask,
    Envelope,
    Message,
    MessagePart,
    Offer,
    Taken,
    Whole,
    decode,
    encode,
)
from horovod.torch.distributed.point_to_point.wire import Wire, is_local, message_error

_READ_AT_ONCE = 1 << 30


@dataclass
class Receive:
    """A receive that waits for a message, or for the rest of one.

    Attributes:
        data: the memory for the message's bytes.
        data_type: the name of the elements' type.
        caller: the line of the script that receives.
        sources: the global ranks that may send it.
        handle: completed when the message is in ``data``, or with an error.
        filled: how many bytes of an asked-for message have arrived.
    """

    data: Array
    data_type: str
    caller: str
    sources: tuple[int, ...]
    handle: Handle
    filled: int = 0


@dataclass
class Own:
    """A message of this process to itself. ``data`` is a view of the tensor's memory."""

    envelope: Envelope
    data: Array
    handle: Handle


@dataclass(eq=False)
class _Source:
    """A connection from a rank that sends to this one.

    Attributes:
        parts: by message number, the receives of messages that this rank has asked for and not got completely.
    """

    rank: int
    channel: Channel
    parts: dict[int, Receive] = field(default_factory=dict)


_Arrived = tuple[_Source | None, Message | Own]


class Receiver:
    """The messages that have arrived, and the receives that wait.

    Args:
        wire: the connections of the mailbox.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._matching: Matching[_Arrived, Receive] = Matching()
        self._sources: list[_Source] = []
        self._unreadable: set[int] = set()

    def begin(self, wanted: ReceiveFilter, receive: Receive) -> None:
        """Deliver a message that has arrived already, or wait for one."""
        found = self._matching.post(wanted, receive)
        if found is not None:
            self._deliver(found[0], found[1], receive)

    def take_own(self, message: Own) -> None:
        """Take a message of this process to itself."""
        self._arrived(message.envelope, (None, message))

    def welcome(self, connection: Connection, purpose: bytes) -> None:
        """Take a new connection from a rank, whose number is its purpose. Closes the connection if the purpose is not one."""
        if not purpose.isdigit():
            connection.close()
            return
        source = _Source(int(purpose), Channel(connection))
        self._sources.append(source)
        self._wire.add(source.channel, lambda events: self._serve(source, events))

    def pending(self) -> list[tuple[Handle, tuple[int, ...], str]] | None:
        """The receives that no message has arrived for: the handle, the ranks that may send it, and a description. None: one
        gets its data now, or a message of this process to itself waits."""
        if any(source.parts for source in self._sources):
            return None
        if any(isinstance(message, Own) for _, message in self._matching.arrived()):
            return None
        return [
            (each.handle, each.sources, f"recv from {list_ranks(each.sources)} at {each.caller}")
            for each in self._matching.posted()
        ]

    def held(self) -> int:
        """The number of messages that wait for a receive. Any thread."""
        return self._matching.held

    def waiting(self) -> bool:
        """Whether a receive waits."""
        return self._matching.waiting() or any(source.parts for source in self._sources)

    def close(self) -> list[Handle]:
        """Close all connections. Returns the handles of the receives that wait."""
        receives = self._matching.take_posted() + [each for source in self._sources for each in source.parts.values()]
        for source in self._sources:
            source.channel.close()
        return [receive.handle for receive in receives]

    def descriptors(self) -> list[int]:
        return [source.channel.fileno() for source in self._sources]

    def _serve(self, source: _Source, events: int) -> None:
        channel = source.channel
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
            for body in self._wire.receive(channel, source.rank) if events & selectors.EVENT_READ else ():
                self._take(source, decode(body))
            self._wire.watch(channel)
        except (ChannelClosed, msgspec.DecodeError, KeyError) as error:
            self._sources.remove(source)
            handles = [receive.handle for receive in source.parts.values()]
            self._wire.drop(channel, source.rank, f"the connection for messages from it broke ({error})", handles)

    def _take(self, source: _Source, message: Message) -> None:
        if isinstance(message, Whole | Offer):
            self._arrived(message.envelope, (source, message))
        elif isinstance(message, MessagePart):
            receive = source.parts[message.number]
            data = np.frombuffer(message.data, np.uint8)
            if receive.filled + data.size > receive.data.size:
                raise ChannelClosed("it sent more bytes than it had offered")
            receive.data[receive.filled : receive.filled + data.size] = data
            receive.filled += data.size
            if receive.filled == receive.data.size:
                del source.parts[message.number]
                self._wire.send(source.channel, source.rank, encode(Taken(message.number)))
                receive.handle.complete()
        else:
            raise ChannelClosed("it sent a message that only a receiver sends")

    def _arrived(self, envelope: Envelope, arrived: _Arrived) -> None:
        receive = self._matching.arrive(envelope, arrived)
        if receive is not None:
            self._deliver(envelope, arrived, receive)

    def _deliver(self, envelope: Envelope, arrived: _Arrived, receive: Receive) -> None:
        """Deliver a message to its receive. If the message does not fit, fail the receive, and the send unless it is done."""
        source, message = arrived
        receive.handle.result = envelope.source
        error = _mismatch(envelope, receive)
        if isinstance(message, Own):
            if not error:
                receive.data[:] = message.data
            message.handle.complete(message_error(error))
        elif isinstance(message, Whole) and not error:
            receive.data[:] = np.frombuffer(message.data, np.uint8)
        elif isinstance(message, Offer) and source is not None:
            if not error and not self._read(source, message, receive):
                source.parts[message.number] = receive
                self._answer(source, Ask(message.number))
                return
            self._answer(source, Taken(message.number, error))
        receive.handle.complete(message_error(error))

    def _answer(self, source: _Source, message: Message) -> None:
        try:
            self._wire.send(source.channel, source.rank, encode(message))
        except (ChannelClosed, KeyError):
            pass  # the connection has ended; _serve() notices that when it reads

    def _read(self, source: _Source, offer: Offer, receive: Receive) -> bool:
        """Read a message from the memory of its sender; False if that is not possible."""
        if not offer.process or not is_local(source.channel.socket) or source.rank in self._unreadable:
            return False
        try:
            for start in range(0, receive.data.size, _READ_AT_ONCE):
                length = min(_READ_AT_ONCE, receive.data.size - start)
                there = np.array([[offer.address + start, length]], np.uintp)
                here = np.array([[address_of(receive.data) + start, length]], np.uintp)
                cross_memory.read(offer.process, length, address_of(there), 1, address_of(here), 1)
        except OSError:
            self._unreadable.add(source.rank)
            return False
        return True


def _mismatch(envelope: Envelope, receive: Receive) -> str:
    """Why a message does not fit a receive; "" if it does."""
    if envelope.nbytes == receive.data.size and envelope.data_type == receive.data_type:
        return ""
    return (
        f"Mismatched send and recv: rank {envelope.source} of the group sent {envelope.nbytes} bytes of "
        f"{envelope.data_type} at {envelope.caller} with tag {envelope.tag}, but the receiver has room for "
        f"{receive.data.size} bytes of {receive.data_type} at {receive.caller}"
    )
