"""Numbers the process sets that were passed to ``init()``, in the same way on every rank.

A set is a list of ranks, the same on every rank; or an mpi4py communicator: each rank passes its own, and each colour of a
``Split`` becomes a set. Numbers are 1, 2, ...: first the communicators in the order of the list, the groups of each in
ascending order, then the lists of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from horovod.core.lifecycle.process_set import ProcessSet, membership
from horovod.core.lifecycle.world import FAILED, World, members


class RequestedSet(msgspec.Struct, array_like=True, frozen=True):
    """One entry of a rank's list: the ranks, and whether they are the group of a communicator that the rank is in."""

    ranks: tuple[int, ...]
    by_communicator: bool = False

    def __str__(self) -> str:
        return f"{list(self.ranks)}{' (of a communicator)' if self.by_communicator else ''}"


class StaticSets(NamedTuple):
    """The sets that all ranks have asked for.

    Attributes:
        ranks: the ranks of each set. Sets are numbered from 1 in this order.
        ids: by entry of this rank's list, the number of its set; None for a duplicate, and where this rank is in no group.
        duplicate: the first entry that names a set which exists already, or None.
    """

    ranks: list[list[int]]
    ids: list[int | None]
    duplicate: int | None


def requested_sets(sets: Sequence[ProcessSet], world: World) -> list[RequestedSet]:
    """The sets that this rank asks for.

    Raises:
        ValueError: an entry is not a ProcessSet.
        NotImplementedError: a set is made from a communicator, but the job is not.
    """
    found = []
    for number, each in enumerate(sets):
        if not isinstance(each, ProcessSet):
            raise ValueError(f"{FAILED}: process_sets entry number {number} is {each!r} and not a ProcessSet.")
        if each.mpi_comm is None:
            found.append(RequestedSet(tuple(each.ranks or ())))
        elif world.communicator is None:
            raise NotImplementedError(  # the type that scripts of the public interface expect
                "Process sets made from an mpi4py communicator need a job that is made from one, too: "
                "hvd.init(comm=MPI.COMM_WORLD, process_sets=...)."
            )
        else:
            found.append(RequestedSet(tuple(members(each.mpi_comm, world.communicator)), by_communicator=True))
    return found


def agree_on_process_sets(requested_by_rank: Sequence[Sequence[RequestedSet]], rank: int) -> StaticSets:
    """The job's sets, the same on every rank.

    Raises:
        ValueError: the ranks contradict each other, or a set lists a rank that does not exist, or one twice.
    """
    own = requested_by_rank[rank]
    for other, theirs in enumerate(requested_by_rank):
        if [_common(requested) for requested in theirs] != [_common(requested) for requested in own]:
            raise ValueError(
                f"{FAILED}: the ranks were given different process sets. Rank {rank} has "
                f"{_shown(own)}, rank {other} has {_shown(theirs)}. Every rank must pass the same list in the same order."
            )
    numbers: dict[tuple[int, ...], int] = {tuple(range(len(requested_by_rank))): 0}
    ids: list[int | None] = [None] * len(own)
    duplicates = []
    for index in sorted(range(len(own)), key=lambda index: not own[index].by_communicator):
        groups = sorted({theirs[index].ranks for theirs in requested_by_rank if not _is_nothing(theirs[index])})
        for group in groups:
            _check(group, requested_by_rank, index)
            if group in numbers:
                duplicates.append(index)
                continue
            numbers[group] = len(numbers)
            if group == own[index].ranks:
                ids[index] = numbers[group]
    return StaticSets([list(group) for group in numbers][1:], ids, min(duplicates, default=None))


def look_up(sets: Sequence[ProcessSet], world: World) -> None:
    """Fill in the numbers that the sets have in the running job.

    Raises:
        KeyError: the job has no such set.
    """
    known = {tuple(ranks): number for number, ranks in membership.ranks.items()}
    for process_set, requested in zip(sets, requested_sets(sets, world), strict=True):
        process_set.process_set_id = known[requested.ranks]
        process_set.ranks = list(requested.ranks)


def _common(requested: RequestedSet) -> RequestedSet:
    """The values that must be the same on all ranks."""
    return RequestedSet((), True) if requested.by_communicator else requested


def _is_nothing(requested: RequestedSet) -> bool:
    """Whether the rank is in no group of the communicator (MPI.COMM_NULL)."""
    return requested.by_communicator and not requested.ranks


def _shown(entries: Sequence[RequestedSet]) -> str:
    return ", ".join(map(str, entries)) or "none"


def _check(group: tuple[int, ...], requested_by_rank: Sequence[Sequence[RequestedSet]], index: int) -> None:
    size = len(requested_by_rank)
    wrong = [rank for rank in group if not 0 <= rank < size]
    problem = ""
    if requested_by_rank[0][index].by_communicator:
        if wrong:
            problem = "its communicator has processes that are not in the job's communicator"
        elif any(requested_by_rank[member][index].ranks != group for member in group):
            problem = "not all of its ranks passed the communicator of this group"
    elif wrong:
        problem = f"rank {wrong[0]} is not one of the job's {size}"
    elif len(set(group)) != len(group) or not group:
        problem = "a rank is listed twice, or there is none"
    if problem:
        raise ValueError(f"{FAILED}: process set {list(group)}: {problem}.")
