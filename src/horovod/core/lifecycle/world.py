"""The processes that make up the job: all that were launched, those of a list, or those of an mpi4py communicator.

:func:`choose` makes a :class:`World` of the argument of ``init(comm=...)``. Ranks are renumbered, in the order of the list or
as the communicator numbers them. Several lists that share no rank are several jobs, side by side.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod._base.process_identity import ProcessIdentity
    from horovod.control.rendezvous.rendezvous_kinds import Rendezvous

FAILED = "Horovod initialization failed"


@dataclass(frozen=True)
class World:
    """The processes of one job, as one of them sees it.

    Attributes:
        identity: this process in the job. If the job is a part of the launched one, the local and cross numbers are right only
            after the exchange of ``init()``: :func:`find_local_ranks`.
        launched: this process's ranks in the launched job.
        listed: the ranks' numbers in the launched job, by rank; empty for all launched ranks and for a communicator.
        communicator: the mpi4py communicator the job consists of, or None.
        rendezvous: how the ranks find each other, if not as the launcher provides.
    """

    identity: ProcessIdentity
    launched: ProcessIdentity
    listed: tuple[int, ...] = ()
    communicator: Any = None
    rendezvous: Rendezvous | None = field(default=None, compare=False)

    @property
    def is_launched_job(self) -> bool:
        """Whether the ranks have the numbers that the launcher gave them."""
        return not self.listed and self.communicator is None

    @property
    def on_this_host(self) -> bool:
        """Whether the launcher knows that all ranks are on this host."""
        return self.launched.local_size == self.launched.size >= self.identity.size


def choose(comm: Any, launched: ProcessIdentity) -> World:
    """The world that ``init(comm)`` asks for.

    Args:
        comm: None or an empty list for all processes, an iterable of ranks of the launched job, or an ``mpi4py.MPI.Comm``.
        launched: this process's ranks in the launched job.

    Raises:
        ValueError: none of these; a rank that does not exist or is listed twice; or this process is not in the list.
    """
    if is_communicator(comm):
        return _of_communicator(comm, launched)
    ranks = [] if comm is None else _listed(comm)
    if not ranks:
        return World(launched, launched)
    twice = [rank for rank, count in Counter(ranks).items() if count > 1]
    if twice:
        raise ValueError(f"{FAILED}: comm={ranks}: rank {twice[0]} is listed more than once.")
    wrong = [rank for rank in ranks if not 0 <= rank < launched.size]
    if wrong:
        raise ValueError(
            f"{FAILED}: comm={ranks}: rank {wrong[0]} is not one of the {launched.size} that {launched.launcher} launched."
        )
    if launched.rank not in ranks:
        raise ValueError(
            f"{FAILED}: comm={ranks}: this process is rank {launched.rank} of the launched job and not among them. Call "
            "hvd.init() only on the ranks of the list, or give the others a list of their own."
        )
    if ranks == list(range(launched.size)):
        return World(launched, launched)
    return World(replace(launched, rank=ranks.index(launched.rank), size=len(ranks)), launched, tuple(ranks))


def is_communicator(value: Any) -> bool:
    """Whether ``value`` is an ``mpi4py.MPI.Comm``. Does not import mpi4py: a script that has one has imported it."""
    mpi = _mpi()
    return mpi is not None and isinstance(value, mpi.Comm)


def members(communicator: Any, within: Any) -> list[int]:
    """The ranks of ``communicator`` as ``within`` numbers them, ascending; -1 for a process that is not in it. Local."""
    mpi = _mpi()
    if communicator == mpi.COMM_NULL:
        return []
    group, outer = communicator.Get_group(), within.Get_group()
    try:
        found = mpi.Group.Translate_ranks(group, range(group.Get_size()), outer)
    finally:
        group.Free()
        outer.Free()
    return sorted(-1 if rank == mpi.UNDEFINED else rank for rank in found)


def find_local_ranks(identity: ProcessIdentity, hosts: Sequence[str]) -> ProcessIdentity:
    """``identity`` with the local and cross numbers that follow from the hosts of the ranks.

    Args:
        hosts: every rank's host, by rank.
    """
    own = hosts[identity.rank]
    counts = Counter(hosts)
    local_rank = hosts[: identity.rank].count(own)
    peers = [host for host, count in counts.items() if count > local_rank]  # in the order of their first ranks
    return replace(
        identity,
        local_rank=local_rank,
        local_size=counts[own],
        cross_rank=peers.index(own),
        cross_size=len(peers),
    )


def _mpi() -> Any:
    return sys.modules.get("mpi4py.MPI")


def _listed(comm: Any) -> list[int]:
    if isinstance(comm, Iterable):
        values = list(comm)
        try:
            if not any(isinstance(value, bool) for value in values):
                return [operator.index(value) for value in values]
        except TypeError:
            pass  # raised below
    raise ValueError(
        f"Invalid type of argument comm: {comm!r}. Pass None for all processes, a list of ranks, or an mpi4py communicator."
    )


def _of_communicator(comm: Any, launched: ProcessIdentity) -> World:
    mpi = _mpi()
    if comm == mpi.COMM_NULL:
        raise ValueError(
            f"{FAILED}: comm is MPI.COMM_NULL: this process belongs to no group. Call hvd.init() only on processes that do."
        )
    if mpi.Is_finalized():
        raise ValueError(f"{FAILED}: MPI is finalized already, so the ranks of comm cannot communicate.")
    if comm.Is_inter():
        raise ValueError(f"{FAILED}: comm is an intercommunicator; merge its groups first: comm.Merge().")
    return World(replace(launched, rank=comm.Get_rank(), size=comm.Get_size()), launched, communicator=comm)
