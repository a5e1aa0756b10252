"""What follows when all members have announced a request: the decision, and what fusion must know of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from horovod.core.negotiation.agreement import disagreement
from horovod.core.negotiation.messages import Decision, Operation, Request

_FUSIBLE = {Operation.ALLREDUCE, Operation.ADASUM, Operation.ALLGATHER, Operation.REDUCESCATTER}


class ReadyRequest(NamedTuple):
    """A decision, and its properties for fusion.

    Attributes:
        key: decisions with equal keys may form a batch; None: it is a batch of its own.
        size: the bytes that it adds to a batch.
        fresh: the members have not been sent this decision before.
        received: of an alltoall, by member the ``received`` of its decision; a member that takes no part has none.
    """

    decision: Decision
    key: tuple[object, ...] | None
    size: int
    fresh: bool
    received: Mapping[int, tuple[int, ...]] = MappingProxyType({})

    def received_by(self, member: int) -> tuple[int, ...]:
        """The ``received`` of its decision."""
        return self.received.get(member, ())

    def for_all(self) -> Decision:
        """The decision without the parts that only one member needs."""
        return msgspec.structs.replace(self.decision, received=())


class NegotiationError(Exception):
    """A member broke the protocol. The checks in its own process should have prevented it."""


def decide(
    name: str, requests: Sequence[Request | None], identifier: int, ranks: Sequence[int], members: Iterable[int]
) -> ReadyRequest:
    """Compare the members' requests, and decide.

    Args:
        requests: by member that takes part; None for one that has joined.
        identifier: the number by which members know the decision later; -1 for none.
        ranks: the global ranks of the members that take part.
        members: their indices among all members.

    Raises:
        NegotiationError: a member's alltoall has splits for another number of ranks.
    """
    first = next(request for request in requests if request is not None)
    operation = first.operation
    error = disagreement(requests, ranks)
    if error:
        lines = {rank: each.caller for rank, each in zip(ranks, requests, strict=True) if each is not None}
        return ReadyRequest(Decision(-1, name, operation, error=error, call_sites=lines), None, 0, True)
    template = first if None in requests else None
    rows: tuple[tuple[int, ...], ...] = ()
    received: dict[int, tuple[int, ...]] = {}
    longest = 0
    if operation is Operation.ALLGATHER:
        rows = tuple(
            tuple(0 if request is None else request.tensors[index].shape[0] for request in requests)
            for index in range(len(first.tensors))
        )
    elif operation is Operation.ALLTOALL:
        splits = [(0,) * len(ranks) if request is None else request.splits for request in requests]
        for rank, row in zip(ranks, splits, strict=True):
            if len(row) != len(ranks):
                raise NegotiationError(f"rank {rank} announced {name!r} with {len(row)} splits for {len(ranks)} ranks")
        received = dict(zip(members, zip(*splits, strict=True), strict=True))
        longest = max(map(max, splits))
    number = -1 if template else identifier
    decision = Decision(
        number,
        name,
        operation,
        rows,
        received.get(0, ()),
        longest,
        template,
        device=first.device,
        members=first.members,
    )
    key: tuple[object, ...] | None = None
    if operation in _FUSIBLE:
        types = frozenset(tensor.data_type for tensor in first.tensors)
        joined = template is not None
        scaling = (first.reduce_op, first.prescale, first.postscale, first.compression)
        key = (operation, types, *scaling, first.device, first.members, joined)
    size = sum(request.nbytes for request in requests if request is not None and operation is Operation.ALLGATHER)
    return ReadyRequest(decision, key, size or first.nbytes, True, received)
