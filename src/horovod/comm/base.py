"""The Communicator contract: what every data-plane engine does, and all that the core knows of a running engine.

A communicator is bound to one group of ranks. A worker thread calls the collectives one after another, every rank of the group
in the same order with matching arguments (the core has agreed on them beforehand, so engines do not check). The data are
:data:`~horovod.comm.spans.Vectors`: ranges of the memory of one kind of device. Host engines make NumPy arrays of them if they
need them; a device engine uses the addresses. ``abort`` alone may be called from other threads.

How an engine is chosen and built is in :mod:`horovod.comm.engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors, host_vector
from horovod.comm.tuned import TunedSettings


class PeerFailure(Exception):
    """A collective could not finish because of one rank of the group: it is gone, has given up, or sent invalid data.

    Attributes:
        rank: the failing rank's index in the communicator's group.
        reason: what was seen, for the error that every rank will show.
        suspected: the rank may itself be a victim of another failure, so the liveness monitor looks for that first.
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
        times: how many times the same wait has reported this, this time included.
        connection: the addresses of the connection; "" if they are not known or do not matter.
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
"""Called on the waiting thread when a peer has made no progress for the communicator's stall timeout, and again after each
further timeout. It returns to continue the wait, or raises. It must not block."""


def give_up(stall: Stall) -> None:
    """Stop waiting: the ``OnStall`` of a communicator without a liveness monitor."""
    raise PeerFailure(stall.rank, stall.reason, suspected=True)


class Aborted(Exception):
    """:meth:`Communicator.abort` has interrupted the collective; its caller knows why."""


class DeviceFailure(Exception):
    """Collectives on a device have failed or exceeded the time limit. The failing rank is not known: the rank that reports this
    may be a victim of another failure.

    Attributes:
        timed_out: the time limit was exceeded.
    """

    def __init__(self, text: str, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class CompletionEvent(Protocol):
    """The completion of a collective that a device carries out after the call has returned."""

    def begun(self) -> bool:
        """Whether the device has done all that comes before the collective. Never blocks. Any thread."""

    def query(self) -> bool:
        """Whether it is over, successfully or not. Never blocks. Any thread."""

    def wait(self) -> None:
        """Let the current stream of the calling thread continue only after it. Never blocks the host. Any thread."""

    def error(self) -> BaseException | None:
        """Why it failed or will never complete, as far as the engine knows; None if nothing is wrong. Any thread."""


Completion: TypeAlias = CompletionEvent | None
"""The result of every collective. None: it is complete; host engines always return this. An event: it is in the device's queue,
and its vectors must be kept alive until the event completes."""


class Communicator(ABC):
    """One engine bound to one group of ranks.

    Every collective must be called by every rank of the group. ``result = postscale * reduce(prescale * x)``, scaling as in
    :func:`horovod.comm.reduction.scale`. An engine on host memory reduces each element in rank order, in any batch. 16-bit
    floats accumulate in 32 bits and are rounded once. The hierarchical engine reduces in rank order on each host, and then in
    the order of hosts. A device's engine may reduce in any order; all ranks get the same bits.

    Every collective raises :class:`PeerFailure` when a peer is gone, and :class:`Aborted` after ``abort()``. It reports a peer
    that makes no progress to the communicator's :data:`OnStall`. After an error the communicator can only be closed.
    """

    name: ClassVar[str]
    """The engine's name as users write it in HOROVOD_CPU_OPERATIONS or HOROVOD_GPU_OPERATIONS, in lower case."""

    any_thread: bool = True
    """Whether a thread that waits for a small collective may carry it out itself. Calls never overlap in either case. False if
    a call may not return after a failure: only the worker thread makes such calls, as it can be abandoned."""

    chosen_because: str = ""
    """On the first rank, why no better engine serves the group; "" if there is none."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> Completion:
        """Reduce each ``inputs[i]`` over the ranks into ``outputs[i]``.

        ``inputs[i]`` and ``outputs[i]`` have the same length and one dtype is common to all; an output may be its input
        (the same memory), never a partly overlapping one. ``op`` is SUM, MIN, MAX or PRODUCT.
        """

    @abstractmethod
    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> Completion:
        """Concatenate each ``inputs[i]`` over the ranks into ``outputs[i]``; ``counts[i][r]`` elements come from rank r.

        One dtype is common to all."""

    @abstractmethod
    def broadcast(self, vectors: Vectors, root: int) -> Completion:
        """Copy each vector of group rank ``root`` over that of all others. The vectors may be of several dtypes."""

    @abstractmethod
    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> Completion:
        """Send ``sent[r]`` consecutive elements of ``source`` to each rank r. Receive ``received[r]`` from it in ``target``,
        in rank order. No rank sends another, or itself, more than ``longest``, which is the same on all ranks.

        Each is one vector. ``source`` may be longer than the sum of what is sent; the rest stays."""

    @abstractmethod
    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> Completion:
        """Reduce each ``inputs[i]`` over the ranks; rank r keeps its ``counts[i][r]`` elements in ``outputs[i]``.

        One dtype is common to all. An output may be this rank's own part of its input, and shares no other memory with it."""

    @abstractmethod
    def barrier(self) -> Completion:
        """Return when every rank of the group has called it."""

    @abstractmethod
    def abort(self) -> None:
        """Interrupt any wait of the worker thread. Any thread, any number of times, even after ``close()``."""

    def may_still_read(self) -> bool:
        """After a failure: whether vectors may still be read, so that their memory must not be given back while this process
        lives. On the thread that carries out collectives, or when it has ended."""
        return False

    def may_still_write(self) -> bool:
        """After a failure: whether vectors may still be read and written, because a library has not ended an operation in time.
        Then the script must not use them again. Called as :meth:`may_still_read`."""
        return False

    def allocate(self, dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
        """A new vector in the kind of memory that this engine moves, filled with ``value``; uninitialized for None."""
        return host_vector(dtype, length, value)

    def follow(self, ready: Any) -> None:
        """Make all later collectives wait on the device for ``ready``, a marker of its
        :class:`~horovod.comm.device.DeviceRuntime`. For engines of device memory."""
        raise TypeError(f"the engine {self.name} moves host memory, which is there when it is handed over")

    def can_split(self) -> bool:
        """Whether this rank can call :meth:`split` now. All ranks must be asked first."""
        return False

    def split(
        self, members: Sequence[int], deadline: float, meanwhile: Callable[[], None] = lambda: None
    ) -> Communicator | None:
        """A communicator of some of this one's ranks, for the same kind of memory; None if this rank is not among them.

        Every rank of this communicator calls it with the same members, after :meth:`can_split` was true on all of them.

        Args:
            members: the new communicator's ranks, as indices in this one, in their new order.
            deadline: ``time.monotonic`` by which it must have succeeded or failed.
            meanwhile: called from time to time while this waits for peers.

        Raises:
            DeviceFailure: it cannot be made.
        """
        raise TypeError(f"the engine {self.name} builds communicators of some ranks from the beginning")

    def tune(self, settings: TunedSettings) -> None:
        """Take over settings that concern it, between two collectives, the same two on all ranks."""
        del settings  # most engines have no such setting

    def alternatives(self) -> list[str]:
        """The engines between which :meth:`tune` chooses, the present one first."""
        return [self.name]

    def engines(self) -> list[str]:
        """The names of this engine and of those that it is composed of."""
        return [self.name]

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close; shared memory is not passed on to it anyway."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give back memory, descriptors and threads. Called once, when no collective runs."""
