"""One rank's liveness connections, and the ranks to which they lead.

The monitor sends messages to ranks and receives them from ranks. This module wraps messages that pass through a relay in a
:class:`Forwarded`, and unwraps them. A relay's monitor sees only messages for the relay itself:

    from rank 0     forwarded to the ranks that it is for
    from below      forwarded towards rank 0, except a Ping, which the relay answers; the relay also handles a Bye itself

So a monitor does the same whether ranks are connected with rank 0 or behind relays.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.liveness_messages import Bye, Forwarded, Message, Ping, decode, encode
from horovod.control.liveness_tree import LivenessTree


class LivenessLinks:
    """The connections of one rank. A link is named by the rank at its other end.

    Args:
        rank: this rank.
        channels: the channels to the ranks with which ``tree`` connects this rank, by rank.
        tree: which ranks are connected with which.
        poll: each channel is registered with it while the channel is open.
    """

    def __init__(self, rank: int, channels: Mapping[int, Channel], tree: LivenessTree, poll: select.poll) -> None:
        self._rank = rank
        self._channels = dict(channels)
        self._poll = poll
        self._above = [link for link in tree.above(rank) if link in channels]
        self._ways = {
            other: tuple(link for link in ways if link in channels) for other, ways in tree.ways(rank).items()
        }
        self._left: set[int] = set()
        self._by_descriptor = {channel.fileno(): link for link, channel in channels.items()}
        for channel in channels.values():
            poll.register(channel, select.POLLIN)

    def __contains__(self, link: int) -> bool:
        return link in self._channels

    def __len__(self) -> int:
        return len(self._channels)

    def of_descriptor(self, descriptor: int) -> int | None:
        """The link with this descriptor; None if there is none."""
        return self._by_descriptor.get(descriptor)

    def descriptors(self) -> list[int]:
        return list(self._by_descriptor)

    @property
    def above(self) -> list[int]:
        """The links towards rank 0."""
        return list(self._above)

    @property
    def links_below(self) -> list[int]:
        """The links to ranks below this one."""
        return [link for link in self._channels if link not in self._above]

    @property
    def below(self) -> list[int]:
        """The ranks below this one that can be reached and have not left."""
        return [rank for rank in self._ways if rank not in self._left and self.ways(rank)]

    def ways(self, rank: int) -> list[int]:
        """The links by which a rank can be reached, in the order of preference."""
        return [link for link in self._ways.get(rank, (rank,)) if link in self._channels]

    def send(self, ranks: Iterable[int], message: Message, other_way: bool = False) -> None:
        """Send to ranks, each by its preferred link; with ``other_way`` by the next one. Messages that cannot be sent are
        dropped."""
        by_link: dict[int, list[int]] = {}
        for rank in ranks:
            ways = self.ways(rank)[other_way:]
            if ways:
                by_link.setdefault(ways[0], []).append(rank)
        body = encode(message)
        for link, some in by_link.items():
            self._write(link, body if some == [link] else encode(Forwarded(some, body)))

    def send_by(self, links: Iterable[int], message: Message) -> None:
        """Send to the rank at the other end of each link."""
        body = encode(message)
        for link in links:
            self._write(link, body)

    def receive(self, link: int) -> Iterator[tuple[int, Message]]:
        """The messages for this rank that have arrived on a link, each with the rank that sent it; from above, that is always
        the link's rank. Messages for other ranks are forwarded.

        Raises:
            ChannelClosed: the connection has ended.
            msgspec.DecodeError: the peer breaks the protocol.
        """
        above = link in self._above
        for body in self._channels[link].receive():
            message = decode(body)
            yield from self._of_above(link, message) if above else self._of_below(link, message, body)

    def _of_above(self, link: int, message: Message) -> Iterator[tuple[int, Message]]:
        if not isinstance(message, Forwarded):
            yield link, message
            return
        for rank in message.ranks:
            if rank == self._rank:
                yield link, decode(message.body)
            elif rank not in self._ways:
                raise msgspec.ValidationError(f"it sends to rank {rank}, which is not behind rank {self._rank}")
            elif rank in self._channels:
                self._write(rank, message.body)

    def _of_below(self, link: int, message: Message, body: bytes) -> Iterator[tuple[int, Message]]:
        rank = link
        if isinstance(message, Forwarded):
            if len(message.ranks) != 1 or link not in self._ways.get(message.ranks[0], ()):
                raise msgspec.ValidationError(
                    f"it forwards a message of ranks {message.ranks}, not of one rank below it"
                )
            (rank,), body = message.ranks, message.body
            message = decode(body)
        own = not self._above or isinstance(message, Ping)
        if not own:
            self._write(self._above[0], encode(Forwarded([rank], body)))
        if own or isinstance(message, Bye):
            yield rank, message

    def flush(self, link: int) -> None:
        """Send what is queued on a link, as far as its socket takes it."""
        self._attempt(self._channels[link], None)

    def flush_all(self, seconds: float) -> None:
        """Send what is queued on all links; wait for their sockets for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while unsent := {each.fileno(): each for each in self._channels.values() if each.wants_write}:
            poll = select.poll()
            for descriptor in unsent:
                poll.register(descriptor, select.POLLOUT)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return
            for descriptor, _ in ready:
                self._attempt(unsent[descriptor], None)

    def _write(self, link: int, body: bytes) -> None:
        if link in self._channels:
            self._attempt(self._channels[link], body)

    def _attempt(self, channel: Channel, body: bytes | None) -> None:
        try:
            if body is not None:
                channel.send(body)
            channel.flush()
        except ChannelClosed:
            channel.discard()  # a Bye that the peer sent before it closed may still have to be read
        self._poll.modify(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))

    def left(self, rank: int) -> None:
        """Record that a rank behind a relay has left."""
        self._left.add(rank)

    def drop(self, link: int) -> list[int]:
        """Close a connection. Returns the ranks to which it led."""
        channel = self._channels.pop(link)
        self._poll.unregister(channel)
        del self._by_descriptor[channel.fileno()]
        channel.close()
        if link in self._above:
            self._above.remove(link)
        return [link, *(rank for rank, ways in self._ways.items() if link in ways and rank != link)]

    def close(self) -> None:
        """Close all connections. No thread polls them any more."""
        for channel in self._channels.values():
            channel.close()
