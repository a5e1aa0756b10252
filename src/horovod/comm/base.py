"""The Communicator contract: what every data-plane engine does, and all that the rest of the house knows of engines.

A communicator is bound to one group of ranks. Its worker thread calls the collectives one after another, every rank of the
group in the same order with matching arguments (the core has agreed on them beforehand, so engines do not check).
Arrays are one-dimensional, C-contiguous NumPy arrays in host memory. ``abort`` alone may be called from other threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors


class PeerFailure(Exception):
    """A collective could not finish because of one rank of the group: it is gone, gave up, or speaks nonsense.

    Attributes:
        rank: the failing rank's index in the communicator's group.
        reason: what was seen, for the error that every rank will show.
        suspected: it may be a victim itself, so whoever knows more should look first whether somebody else is lost.
    """

    def __init__(self, rank: int, reason: str, suspected: bool = False) -> None:
        super().__init__(f"rank {rank} of the group: {reason}")
        self.rank = rank
        self.reason = reason
        self.suspected = suspected


class Stall(NamedTuple):
    """A peer makes no progress while it is waited for in a collective.

    Attributes:
        rank: its index in the communicator's group.
        seconds: since when.
        times: how often this was told in the same wait, this time included.
        connection: between which addresses it is waited for, where that is known and matters.
    """

    rank: int
    seconds: float
    times: int
    connection: str = ""

    @property
    def reason(self) -> str:
        where = f", on the connection {self.connection}," if self.connection else ""
        return f"it made no progress in a collective{where} for {self.seconds:.3g} seconds"


OnStall: TypeAlias = Callable[[Stall], None]
"""Called on the waiting thread when a peer has made no progress for the communicator's patience, and each time as long after
that. It returns to have it waited for, or raises. Must not block."""


def give_up(stall: Stall) -> None:
    """Do not wait any longer: the ``OnStall`` of a communicator that nobody watches."""
    raise PeerFailure(stall.rank, stall.reason, suspected=True)


class Aborted(Exception):
    """The collective was interrupted by :meth:`Communicator.abort`; whoever called that knows why."""


class Communicator(ABC):
    """One engine bound to one group of ranks.

    Every collective must be called by every rank of the group. Each element of a reduction is reduced in rank order
    ``((x0 + x1) + x2) + ...``, so results have the same bits on all ranks and from run to run, whatever batch they
    travelled in; 16-bit floats accumulate in 32 bits and are rounded once. ``result = postscale * reduce(prescale * x)``,
    scaling as in :func:`horovod.comm.reduction.scale`.

    Every collective raises :class:`PeerFailure` when a peer is gone, and :class:`Aborted` after ``abort()``; a peer that makes
    no progress is told to the communicator's :data:`OnStall`. After an error the communicator can only be closed.
    """

    name: ClassVar[str]
    """The engine's name as users write it in HOROVOD_CPU_OPERATIONS."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        """Reduce each ``inputs[i]`` over the ranks into ``outputs[i]``.

        ``inputs[i]`` and ``outputs[i]`` have the same length and one dtype is common to all; an output may be its input
        (the same memory), never a partly overlapping one. ``op`` is SUM, MIN, MAX or PRODUCT.
        """

    @abstractmethod
    def allgather(self, inputs: Sequence[Array], outputs: Sequence[Array], counts: Sequence[Sequence[int]]) -> None:
        """Concatenate each ``inputs[i]`` over the ranks into ``outputs[i]``; ``counts[i][r]`` elements come from rank r."""

    @abstractmethod
    def broadcast(self, array: Array, root: int) -> None:
        """Copy ``array`` of group rank ``root`` over ``array`` of all others."""

    @abstractmethod
    def alltoall(self, source: Array, target: Array, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
        """Send ``send_counts[r]`` consecutive elements of ``source`` to each rank r; receive in rank order in ``target``.

        ``source`` may be longer than the sum of its counts; the rest stays."""

    @abstractmethod
    def reducescatter(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce each ``inputs[i]`` over the ranks; rank r keeps its ``counts[i][r]`` elements in ``outputs[i]``.

        No output may share memory with an input."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank of the group has called it."""

    @abstractmethod
    def abort(self) -> None:
        """Wake the worker thread out of whatever it waits for. Any thread, any number of times, even after ``close()``."""

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close; shared memory is not passed on to it anyway."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give back memory, descriptors and threads. Called once, when no collective runs."""
