"""The role of every rank but the first: it announces requests to the coordinator and carries out its orders.

On several hosts there may be a relay between the two (:mod:`horovod.core.worker.relay`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Gather,
    Leave,
    MessageError,
    Operation,
    Order,
    Request,
    StepsMade,
    Stop,
    Succeeded,
    decode_from_coordinator,
    encode,
)
from horovod.core.negotiation.request_dictionary import RequestEncoder
from horovod.core.negotiation.tree import COORDINATOR
from horovod.core.worker.connections import Connections
from horovod.core.worker.fast_path import FastPath
from horovod.core.worker.role import Role, Schedule

_MOMENT_SECONDS = 1e-3
"""Requests that are younger than this are announced without their age."""


class Member(Role):
    """Announces requests, and schedules the batches that the coordinator orders.

    Args:
        connections: with the member ``parent``, the coordinator or a relay.
        fast_path: None if the ranks share no memory.
        capacity: how many requests the announcements abbreviate.
    """

    announces_between_batches = True
    """So the coordinator knows the next requests early."""

    def __init__(
        self,
        connections: Connections,
        schedule: Schedule,
        fast_path: FastPath | None,
        capacity: int,
        parent: int = COORDINATOR,
    ) -> None:
        self._parent = parent
        self._connections = connections
        self._schedule = schedule
        self._fast_path = fast_path
        self._encoder = RequestEncoder(capacity)
        self._decisions: dict[int, Decision] = {}

    def announce(self, requests: Sequence[Request], since: Sequence[float] = ()) -> None:
        now = time.monotonic()
        ages = [now - each for each in since] if since and now - since[0] > _MOMENT_SECONDS else []
        proposal, proposed = self._fast_path.given_up(requests[0]) if self._fast_path is not None else (0, 0)
        message = Announce(self._encoder.items(requests), proposal, now, ages, proposed)
        self._connections.send(self._parent, encode(message))

    def leave(self, reason: str, steps: Sequence[StepsMade] = ()) -> None:
        self._connections.send(self._parent, encode(Leave(reason, list(steps))))

    def receive(self, member: int, body: bytes) -> None:
        message = decode_from_coordinator(body)
        if isinstance(message, Order):
            self._follow(message)
        elif isinstance(message, Stop):
            self._schedule.stop = message
            self._connections.drop(member)  # it is the last message; its sender closes the connection after it
        elif isinstance(message, Succeeded):
            self._resolve(message.proposal)
        else:
            assert isinstance(message, Gather)
            self._gather(message)

    def _follow(self, order: Order) -> None:
        if order.tuned is not None:
            self._schedule.batches.append(order.tuned)
        received = iter(order.received)
        self._schedule.batches.extend([[self._decision(item, received) for item in batch] for batch in order.batches])

    def _gather(self, message: Gather) -> None:
        raise MessageError("it speaks to a relay, and this rank is none")

    def decide(self) -> None:
        """Nothing: the coordinator decides."""

    def stop(self, stop: Stop) -> None:
        """Nothing: Stop is the last message."""

    def _resolve(self, proposal: int) -> None:
        if self._fast_path is None:
            raise MessageError("there are no proposals without shared memory")
        try:
            entries = self._fast_path.resolve(proposal)
        except ValueError as error:
            raise MessageError(str(error)) from error
        if entries:
            self._fast_path.finish(entries)

    def _decision(self, item: int | Decision, received: Iterator[tuple[int, ...]]) -> Decision:
        if isinstance(item, int):
            try:
                return self._decisions[item]
            except KeyError:
                raise MessageError(f"decision {item} was never defined") from None
        if item.operation is Operation.ALLTOALL and not item.error:
            rows = next(received, None)
            if rows is None:
                raise MessageError(f"the order does not say what this rank receives in {item.name!r}")
            item = msgspec.structs.replace(item, received=rows)
        if item.identifier >= 0:
            self._decisions[item.identifier] = item
        return item
