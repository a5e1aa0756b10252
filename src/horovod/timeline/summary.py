"""Summarizes a timeline: time by phase, operation, tensor and rank. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from horovod.diagnose.stragglers import LEAST_COLLECTIVES, RankDelays, Submissions, delays
from horovod.observe.stragglers import LEAST_SHARE, slowest
from horovod.timeline.collectives import RecordedCollective

Interval = tuple[float, float]


class Batch(NamedTuple):
    """Tensors that were carried out as one collective.

    Attributes:
        bus_bytes: the bytes that each rank's link must carry at least, in one direction, as NCCL's tests count it.
    """

    operation: str
    engine: str
    begun: float
    ended: float
    tensors: list[RecordedCollective]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.tensors)

    @property
    def submitted(self) -> dict[int, float]:
        """When each rank had submitted all of it."""
        ranks = {rank for each in self.tensors for rank in each.submitted}
        return {rank: max(each.submitted.get(rank, 0.0) for each in self.tensors) for rank in ranks}

    @property
    def bus_bytes(self) -> float:
        ranks = max(1, max(len(each.submitted) for each in self.tensors))
        return self.bytes * _BUS.get(self.operation, _BUS["ALLREDUCE"])(ranks)


_BUS: Mapping[str, Callable[[int], float]] = {
    "ALLREDUCE": lambda ranks: 2 * (ranks - 1) / ranks,
    "ALLGATHER": lambda ranks: ranks - 1.0,  # of the bytes that one rank contributes
    "BROADCAST": lambda ranks: float(ranks > 1),
    "ALLTOALL": lambda ranks: (ranks - 1) / ranks,
    "REDUCESCATTER": lambda ranks: (ranks - 1) / ranks,
}


class OperationTotal(NamedTuple):
    """One operation on one engine. ``seconds`` and ``bus_bytes`` are those of its batches."""

    operation: str
    engine: str
    batches: int
    tensors: int
    bytes: int
    seconds: float
    bus_bytes: float


class TensorTotal(NamedTuple):
    """One tensor: how long it waited for the last rank, and how long its batches took, in all."""

    tensor: str
    times: int
    bytes: int
    waited: float
    carried_out: float


class RankTotal(NamedTuple):
    """One rank.

    Attributes:
        waited: the seconds in which it had submitted something that another rank had not.
        last: the number of batches that it was the last to submit.
        lost: the seconds that the others lose because of it.
        before: the tensor before which it loses most; "" if it loses nothing.
    """

    rank: int
    waited: float
    last: int
    lost: float
    before: str


class Summary(NamedTuple):
    """A timeline. ``carried_out``, ``waiting`` and ``idle`` add up to ``seconds``.

    Attributes:
        carried_out: some collective was being carried out on rank 0.
        waiting: none was, and some rank had submitted one: it waited for another rank, or for the agreement.
        idle: no rank had submitted anything: the script computed, or loaded data.
        straggler: the rank that delays the others, if one does.
    """

    seconds: float
    carried_out: float
    waiting: float
    idle: float
    batches: list[Batch]
    operations: list[OperationTotal]
    tensors: list[TensorTotal]
    ranks: list[RankTotal]
    straggler: int | None


def summarize(found: Sequence[RecordedCollective]) -> Summary:
    """Sum up the collectives of a timeline, of which there is at least one."""
    cut = batches(found)
    first = min(min(each.submitted.values(), default=each.begun) for each in found)
    seconds = max(each.ended for each in found) - first
    running = union((each.begun, each.ended) for each in cut)
    busy = union((min(each.submitted.values(), default=each.begun), each.ended) for each in found)
    carried_out = length(running)
    ranks, straggler = _ranks(cut, seconds)
    return Summary(
        seconds,
        carried_out,
        length(busy) - carried_out,
        max(0.0, seconds - length(busy)),
        cut,
        _operations(cut),
        _tensors(found),
        ranks,
        straggler,
    )


def batches(found: Iterable[RecordedCollective]) -> list[Batch]:
    """The batches, in the order in which they began. Tensors of one batch have the same times."""
    cut: dict[tuple[float, float, str, str], list[RecordedCollective]] = defaultdict(list)
    for each in found:
        cut[each.begun, each.ended, each.operation, each.engine].append(each)
    return [
        Batch(operation, engine, begun, ended, tensors)
        for (begun, ended, operation, engine), tensors in sorted(cut.items())
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals. The result is in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in disjoint)


def waits(cut: Iterable[Batch]) -> dict[int, list[Interval]]:
    """By rank, when it had submitted something that another rank had not."""
    found: dict[int, list[Interval]] = defaultdict(list)
    for batch in cut:
        for tensor in batch.tensors:
            last = max(tensor.submitted.values(), default=0.0)
            for rank, at in tensor.submitted.items():
                found[rank].append((at, last))
    return {rank: union(found[rank]) for rank in sorted(found)}


def _operations(cut: Iterable[Batch]) -> list[OperationTotal]:
    kinds: dict[tuple[str, str], list[Batch]] = defaultdict(list)
    for each in cut:
        kinds[each.operation, each.engine].append(each)
    totals = [
        OperationTotal(
            operation,
            engine,
            len(group),
            sum(len(each.tensors) for each in group),
            sum(each.bytes for each in group),
            sum(each.ended - each.begun for each in group),
            sum(each.bus_bytes for each in group),
        )
        for (operation, engine), group in kinds.items()
    ]
    return sorted(totals, key=lambda each: -each.seconds)


def _tensors(found: Iterable[RecordedCollective]) -> list[TensorTotal]:
    names: dict[str, list[RecordedCollective]] = defaultdict(list)
    for each in found:
        names[each.tensor].append(each)
    totals = [
        TensorTotal(
            name,
            len(group),
            sum(each.bytes for each in group),
            sum(max(each.submitted.values()) - min(each.submitted.values()) for each in group if each.submitted),
            sum(each.ended - each.begun for each in group),
        )
        for name, group in names.items()
    ]
    return sorted(totals, key=lambda each: -(each.waited + each.carried_out))


def _ranks(cut: Sequence[Batch], seconds: float) -> tuple[list[RankTotal], int | None]:
    """The totals by rank, and the rank that delays the others, if one does."""
    waited = waits(cut)
    # Ranks of smaller process sets count from zero as well: only batches of as many ranks as the largest have are compared.
    whole = [each for each in cut if len(each.submitted) == len(waited) > 1]
    found = delays(
        Submissions(each.tensors[0].tensor, each.submitted, dict.fromkeys(each.submitted, each.ended)) for each in whole
    )
    lost = found.lost
    last = [max(each.submitted, key=lambda rank: each.submitted[rank]) for each in whole]
    totals = [
        RankTotal(
            rank,
            length(waited[rank]),
            last.count(rank),
            sum(lost.get(rank, {}).values()),
            max(lost.get(rank, {}), key=lambda name: lost[rank][name], default=""),
        )
        for rank in waited
    ]
    return totals, _straggler(found, seconds, len(cut))


def _straggler(found: RankDelays, seconds: float, count: int) -> int | None:
    if count < LEAST_COLLECTIVES or seconds <= 0:
        return None
    named = slowest({rank: waited / seconds for rank, waited in found.waited.items()}, LEAST_SHARE)
    return named[0] if named is not None and named[0] in found.lost else None
