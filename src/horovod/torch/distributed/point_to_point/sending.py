"""The sending half of a mailbox: connections to the ranks that this one sends to, and the messages to them.

All functions run on the mailbox's thread.
"""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from horovod.comm.datatypes import Array
from horovod.comm.spans import address_of
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from horovod.core.errors import RankLostError
from horovod.core.requests.handle import Handle
from horovod.torch.distributed.point_to_point.messages import (
    EAGER_BYTES,
    EAGER_LOCAL_BYTES,
    PART_BYTES,
    Ask,
    Envelope,
    MessagePart,
    Offer,
    Taken,
    Whole,
    decode,
    encode,
)
from horovod.torch.distributed.point_to_point.peers import PeerEndpoint
from horovod.torch.distributed.point_to_point.wire import Wire, is_local, message_error


@dataclass
class Send:
    """A message that is being sent.

    Attributes:
        data: the bytes, as a view of the tensor's memory.
        handle: completed when the script may change ``data``, or with an error.
        number: the number of the message; 0 until it is transmitted.
        sent: how many bytes were sent of a message that the receiver has asked for.
    """

    envelope: Envelope
    data: Array
    handle: Handle
    number: int = 0
    sent: int = 0


@dataclass
class _Peer:
    """A rank that this one sends to.

    Attributes:
        channel: None while there is no connection.
        endpoint: the rank's endpoint; None until the first connection.
        queued: messages that wait for the connection.
        offered: by number, messages that the peer has not taken yet.
        streaming: the offered messages that the peer has asked for, until they are sent completely.
    """

    channel: Channel | None = None
    endpoint: PeerEndpoint | None = None
    queued: list[Send] = field(default_factory=list)
    offered: dict[int, Send] = field(default_factory=dict)
    streaming: deque[Send] = field(default_factory=deque)


class Sender:
    """The messages that this process sends.

    Args:
        wire: the connections of the mailbox.
        namespace: this process's namespace; ranks in the same one may read its memory.
        connect: starts to connect to a rank, and later calls :meth:`connected`.
    """

    def __init__(self, wire: Wire, namespace: str, connect: Callable[[int], None]) -> None:
        self._wire = wire
        self._namespace = namespace
        self._connect = connect
        self._peers: dict[int, _Peer] = {}
        self._numbers = 0

    def begin(self, rank: int, send: Send) -> None:
        """Send a message to a rank."""
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer()
            self._connect(rank)
        if peer.channel is None:
            peer.queued.append(send)
        else:
            self._transmit(rank, peer, send)

    def connected(self, rank: int, connection: Connection | None, endpoint: PeerEndpoint | None, why: str) -> None:
        """Take the connection to a rank, and send the queued messages. ``connection`` is None if there will be none; then the
        messages fail with the reason ``why``."""
        peer = self._peers[rank]
        queued, peer.queued = peer.queued, []
        if connection is None:
            del self._peers[rank]
            for send in queued:
                send.handle.complete(RankLostError(f"Horovod: {why}", ranks=[rank], reason=why))
            return
        peer.channel, peer.endpoint = Channel(connection), endpoint
        self._wire.add(peer.channel, lambda events: self._serve(rank, peer, events))
        for send in queued:
            self._transmit(rank, peer, send)

    def pending(self) -> list[tuple[Handle, tuple[int, ...], str]] | None:
        """The messages that their receivers have not taken: the handle, the receiver, and a description. None: one is being
        sent."""
        if any(peer.streaming for peer in self._peers.values()):
            return None
        return [
            (send.handle, (rank,), f"send of {send.data.size} bytes to rank {rank} at {send.envelope.caller}")
            for rank, peer in self._peers.items()
            for send in [*peer.queued, *peer.offered.values()]
        ]

    def unconnected(self) -> list[int]:
        """The ranks to which messages wait for a connection."""
        return [rank for rank, peer in self._peers.items() if peer.queued]

    def busy(self) -> bool:
        """Whether a message waits for a connection or for its receiver."""
        return any(peer.queued or peer.offered for peer in self._peers.values())

    def close(self) -> list[Handle]:
        """Close all connections. Returns the handles of the messages that wait."""
        sends = [send for peer in self._peers.values() for send in [*peer.queued, *peer.offered.values()]]
        for peer in self._peers.values():
            if peer.channel is not None:
                peer.channel.close()
        return [send.handle for send in sends]

    def descriptors(self) -> list[int]:
        return [peer.channel.fileno() for peer in self._peers.values() if peer.channel is not None]

    def _transmit(self, rank: int, peer: _Peer, send: Send) -> None:
        channel, endpoint = peer.channel, peer.endpoint
        if channel is None or endpoint is None:  # the connection was lost meanwhile
            self.begin(rank, send)
            return
        self._numbers += 1
        send.number = self._numbers
        peer.offered[send.number] = send
        visible = self._namespace and endpoint.process_namespace == self._namespace and is_local(channel.socket)
        try:
            if send.data.size <= (EAGER_LOCAL_BYTES if visible else EAGER_BYTES):
                self._wire.send(channel, rank, encode(Whole(send.envelope, send.data.tobytes())))
                peer.offered.pop(send.number).handle.complete()
                return
            process = os.getpid() if visible else 0
            self._wire.send(channel, rank, encode(Offer(send.envelope, send.number, process, address_of(send.data))))
        except ChannelClosed as error:
            self._drop(rank, peer, channel, str(error))

    def _serve(self, rank: int, peer: _Peer, events: int) -> None:
        channel = peer.channel
        if channel is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
            for body in self._wire.receive(channel, rank) if events & selectors.EVENT_READ else ():
                self._take(peer, body)
            self._stream(rank, peer, channel)
            self._wire.watch(channel)
        except (ChannelClosed, msgspec.DecodeError, KeyError) as error:
            self._drop(rank, peer, channel, str(error))

    def _take(self, peer: _Peer, body: bytes) -> None:
        message = decode(body)
        if isinstance(message, Taken):
            peer.offered.pop(message.number).handle.complete(message_error(message.error))
        elif isinstance(message, Ask):
            peer.streaming.append(peer.offered[message.number])
        else:
            raise ChannelClosed("it sent a message that only a sender sends")

    def _stream(self, rank: int, peer: _Peer, channel: Channel) -> None:
        """Send parts of the messages that the peer has asked for, until the socket is full."""
        while peer.streaming and not channel.wants_write:
            send = peer.streaming[0]
            part = send.data[send.sent : send.sent + PART_BYTES]
            self._wire.send(channel, rank, encode(MessagePart(send.number, part.tobytes())))
            send.sent += part.size
            if send.sent == send.data.size:
                peer.streaming.popleft()

    def _drop(self, rank: int, peer: _Peer, channel: Channel, why: str) -> None:
        self._peers.pop(rank, None)
        peer.channel = None
        handles = [send.handle for send in peer.offered.values()]
        self._wire.drop(channel, rank, f"the connection for messages to it broke ({why})", handles)
