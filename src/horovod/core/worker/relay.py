"""The role of the first rank of each host but the coordinator's, in a process set on several hosts.

It is a member, and it communicates with the coordinator for the other members of its host. It counts their announcements
(:mod:`horovod.core.negotiation.host_tally`), and forwards each once for all of them. It forwards the coordinator's messages to
them before it acts on them. It decides nothing.

If a relay dies, its connections close, and the coordinator and the members of its host report it, as they do with any rank: the
job fails, and the relay is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from horovod.control.sealing import Message
from horovod.core.negotiation.host_tally import ALL_MEMBERS, HostTally
from horovod.core.negotiation.messages import (
    Gather,
    Leave,
    MessageError,
    Operation,
    Order,
    Relayed,
    Request,
    Share,
    StepsMade,
    Stop,
    decode_from_member,
    encode,
)
from horovod.core.negotiation.request_dictionary import RequestDecoder, RequestEncoder
from horovod.core.worker.connections import Connections
from horovod.core.worker.member import Member
from horovod.core.worker.role import Schedule


class Relay(Member):
    """Passes announcements up and orders down.

    Args:
        connections: with the coordinator, and with each other member of ``group``.
        group: the members of this host; the first is this rank.
        ranks: the global ranks of all members of the process set.
        seconds: how long it may take to send the last message.
    """

    def __init__(
        self,
        connections: Connections,
        schedule: Schedule,
        capacity: int,
        group: Sequence[int],
        ranks: Sequence[int],
        seconds: float,
    ) -> None:
        super().__init__(connections, schedule, None, capacity)
        self._index, *self._children = group
        self._seconds = seconds
        self._tally = HostTally(group, [ranks[member] for member in group])
        self._decoders = {member: RequestDecoder(capacity) for member in self._children}
        self._encoders = {member: RequestEncoder(capacity) for member in (ALL_MEMBERS, *group)}

    def announce(self, requests: Sequence[Request], since: Sequence[float] = ()) -> None:
        self._tally.announce(self._index, requests, time.monotonic(), since)

    def leave(self, reason: str, steps: Sequence[StepsMade] = ()) -> None:
        self._leave(self._index, Leave(reason, list(steps)))

    def receive(self, member: int, body: bytes) -> None:
        if member == self._parent:
            super().receive(member, body)
            return
        message = decode_from_member(body)
        if isinstance(message, Leave):
            self._leave(member, message)
        elif isinstance(message, Relayed) or message.proposal:
            raise MessageError("it is neither a relay nor does it share memory with the coordinator")
        else:
            requests = self._decoders[member].requests(message.items)
            # The clock of another process of this host is this one's.
            ages = message.ages or [0.0] * len(requests)
            since = () if self._tally.gathers else [message.sent - age for age in ages]
            self._tally.announce(member, requests, time.monotonic(), since)

    def decide(self) -> None:
        """Forward the announcements of this host, in one message."""
        self._tally.pass_on_overdue(time.monotonic())
        self._send_shares()

    def stop(self, stop: Stop) -> None:
        """Pass Stop on, behind everything else."""
        body = Message(encode(stop))
        for child in self._children:
            self._connections.send(child, body)
        self._connections.flush_all(self._seconds)

    def milliseconds(self) -> float | None:
        due = self._tally.due()
        return None if due is None else max(1.0, (due - time.monotonic()) * 1000)

    def _follow(self, order: Order) -> None:
        # Before this rank carries anything out: the other ranks of the host take part in it.
        shares = order.shares or [[]] * len(self._children)
        if len(shares) != len(self._children):
            raise MessageError(f"an order for {len(shares)} members came to a relay of {len(self._children)}")
        common = msgspec.structs.replace(order, batches=msgspec.Raw(encode(order.batches)), received=[], shares=[])
        body = Message(encode(common))
        for child, received in zip(self._children, shares, strict=True):
            own = encode(msgspec.structs.replace(common, received=received)) if received else body
            self._connections.send(child, own)
        super()._follow(order)
        if any(
            not isinstance(item, int) and item.operation is Operation.JOIN for each in order.batches for item in each
        ):
            self._tally.all_joined()

    def _gather(self, message: Gather) -> None:
        self._tally.gathers = message.on

    def _leave(self, member: int, message: Leave) -> None:
        self._send_shares()
        self._connections.send(self._parent, encode(Leave(message.reason, message.steps, member)))

    def _send_shares(self) -> None:
        shares = self._tally.take()
        if not shares:
            return
        now = time.monotonic()
        found = []
        for member, requests, since in shares:
            found.append(Share(member, self._encoders[member].items(requests), [now - at for at in since]))
        self._connections.send(self._parent, encode(Relayed(found, now)))
