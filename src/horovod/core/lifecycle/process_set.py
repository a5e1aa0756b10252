"""Process sets of the public interface: subsets of the job's ranks that run collectives of their own.

``membership`` has the sets of the running generation, which fills it in. A :class:`ProcessSet` only reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from horovod.core.errors import NOT_INITIALIZED
from horovod.core.lifecycle.world import is_communicator

_INVALID = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"


class ProcessSetTable:
    """The process sets of the running generation.

    Attributes:
        rank: this process's global rank, -1 while not initialised.
        ranks: by process set id, the members' global ranks in ascending order.
    """

    def __init__(self) -> None:
        self.rank = -1
        self.ranks: dict[int, list[int]] = {}

    def clear(self) -> None:
        self.rank = -1
        self.ranks = {}


membership = ProcessSetTable()


class ProcessSet:
    """A set of global ranks.

    Args:
        ranks_or_comm: global ranks in any order; or an ``mpi4py.MPI.Comm``, for ``hvd.init(comm=..., process_sets=...)``.

    Attributes:
        process_set_id: the number of a registered set; 0 is the global set. None before the set is registered.
        ranks: the members' global ranks in ascending order. None if the set was made from a communicator and is not registered.
        mpi_comm: the communicator that the set was made from, or None.

    Raises:
        ValueError: the argument is neither an iterable of non-boolean integers nor a communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = [int(each) if isinstance(each, np.integer) else each for each in ranks_or_comm]
        except TypeError:
            raise ValueError(f"{_INVALID}, not {type(ranks_or_comm).__name__}") from None
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank.bit_length() > 63:
                raise ValueError(f"{_INVALID}; {rank!r:.100} is not a rank")
        self.ranks = sorted(map(operator.index, ranks))  # plain ints: those of a subclass cannot be sent

    def size(self) -> int | None:
        """The number of members; None before the set is registered.

        Raises:
            ValueError: not initialised, or no longer registered.
        """
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """This process's index in the set, from 0; None before the set is registered.

        Raises:
            ValueError: not initialised, no longer registered, or this process is not a member.
        """
        if self.process_set_id is None:
            return None
        members = self._members()
        if membership.rank not in members:
            raise ValueError(
                f"Process is not part of provided process set. This is rank {membership.rank}, its ranks are {members}."
            )
        return members.index(membership.rank)

    def included(self) -> bool | None:
        """Whether this process is a member; None if the ranks are not known yet.

        Raises:
            ValueError: not initialised.
        """
        if self.ranks is None:
            return None
        if membership.rank < 0:
            raise ValueError(NOT_INITIALIZED)
        return membership.rank in self.ranks

    def _members(self) -> list[int]:
        if membership.rank < 0:
            raise ValueError(NOT_INITIALIZED)
        members = membership.ranks.get(self.process_set_id if self.process_set_id is not None else -1)
        if members is None:
            raise ValueError(f"{self} does not exist, or has not been registered.")
        return members

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.process_set_id == 0, self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks of the job. ``init()`` fills in its ``ranks``."""
global_process_set.process_set_id = 0


def _loaded(is_global: bool, ranks: list[int] | None) -> ProcessSet:
    """A process set that was pickled: the registered one of the same ranks, or one that is not registered."""
    if is_global:
        return global_process_set
    made = ProcessSet(ranks or [])
    made.process_set_id = next((number for number, members in membership.ranks.items() if members == ranks), None)
    return made
