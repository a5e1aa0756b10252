"""The Communicator contract: what every data-plane engine does, and all that the core knows of a running engine.

A communicator is bound to one group of ranks. One thread at a time calls the collectives, one after another. Every rank of the
group calls them in the same order with matching arguments (the core has agreed on them beforehand, so engines do not check).
The data are :data:`~horovod.comm.spans.Vectors`: ranges of the memory of one kind of device. Engines for host memory make NumPy
arrays of them where they need arrays; an engine for device memory uses the addresses. Only ``abort`` may be called while
another thread is in a collective.

:mod:`horovod.comm.engine` says how an engine is chosen and built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors, host_vector
from horovod.comm.tuned import TunedSettings


class PeerFailure(Exception):
    """A collective could not finish because of one rank of the group: it is gone, has given up, or has sent invalid data.

    Attributes:
        rank: the failing rank's index in the communicator's group.
        reason: what this rank has observed, for the error that every rank shows.
        suspected: the rank may itself be a victim of another failure, so the liveness monitor looks for that failure first.
    """

    def __init__(self, rank: int, reason: str, suspected: bool = False) -> None:
        super().__init__(f"rank {rank} of the group: {reason}")
        self.rank = rank
        self.reason = reason
        self.suspected = suspected


class Stall(NamedTuple):
    """A peer makes no progress while this rank waits for it in a collective.

    Attributes:
        rank: the peer's index in the communicator's group.
        seconds: how long the peer has made no progress.
        times: how many times the same wait has reported the peer, including this time.
        connection: the addresses of the connection; "" if they are not known or do not matter.
    """

    rank: int
    seconds: float
    times: int
    connection: str = ""

    @property
    def reason(self) -> str:
        """The text for errors."""
        where = f", on the connection {self.connection}," if self.connection else ""
        return f"it made no progress in a collective{where} for {self.seconds:.3g} seconds"


OnStall: TypeAlias = Callable[[Stall], None]
"""Called on the waiting thread when a peer has made no progress for the communicator's stall timeout, and again after each
further timeout. It returns to continue the wait, or raises. It must not block."""


def give_up(stall: Stall) -> None:
    """Raise PeerFailure, which ends the wait: the ``OnStall`` of a communicator without a liveness monitor."""
    raise PeerFailure(stall.rank, stall.reason, suspected=True)


class Aborted(Exception):
    """:meth:`Communicator.abort` has interrupted the collective. The caller of ``abort`` knows the reason."""


class DeviceFailure(Exception):
    """Collectives on a device have failed or exceeded their time limit. The failing rank is not known: the rank that raises
    this may be a victim of another failure.

    Attributes:
        timed_out: whether the time limit was exceeded.
    """

    def __init__(self, text: str, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class CompletionEvent(Protocol):
    """The completion of a collective that a device carries out after the call has returned."""

    def begun(self) -> bool:
        """Whether the device has done all work that comes before the collective. Never blocks. Any thread may call it."""

    def query(self) -> bool:
        """Whether the collective is over, successfully or not. Never blocks. Any thread may call it."""

    def wait(self) -> None:
        """Make later work on the calling thread's current stream wait for the collective. Does not block the host, unless the
        framework exposes no stream. Any thread may call it."""

    def error(self) -> BaseException | None:
        """Why the collective has failed or will never complete, as far as the engine knows; None if no error is known. Any
        thread may call it."""


Completion: TypeAlias = CompletionEvent | None
"""The result of every collective. None means that it is complete; engines for host memory always return None. An event means
that it is in the device's queue; its vectors must be kept alive until the event completes."""


class Communicator(ABC):
    """One engine bound to one group of ranks.

    Every rank of the group must call every collective. Reductions compute ``postscale * reduce(prescale * x)``, scaling as
    :func:`horovod.comm.reduction.scale` does. An engine for host memory combines each element in the tree of
    :mod:`horovod.comm.reduction`, in any batch. 16-bit floats accumulate in 32 bits and are rounded once. The hierarchical
    engine has a tree for each host and one for the hosts, and rounds 16-bit floats twice. An engine for device memory may
    reduce in any order. With every engine all ranks get the same bits.

    A collective of an engine for host memory raises :class:`PeerFailure` when a peer is gone, and reports a peer that makes no
    progress to the communicator's :data:`OnStall`. An engine for device memory raises :class:`DeviceFailure`, or the
    :class:`CompletionEvent` reports it. Every collective raises :class:`Aborted` after ``abort()``. After an error the
    communicator can only be closed.
    """

    name: ClassVar[str]
    """The engine's name as users write it in HOROVOD_CPU_OPERATIONS or HOROVOD_GPU_OPERATIONS, in lower case."""

    any_thread: bool = True
    """Whether a thread that waits for a small collective may carry it out itself, instead of the worker thread. Calls never
    overlap in either case. False if a call may not return after a failure: the worker thread can be abandoned."""

    compresses: bool = False
    """Whether compressed allreduces use :meth:`allreduce_compressed`. Between ranks of one host, and in the memory of devices,
    they are carried out as if compression had not been requested."""

    compared: bool = False
    """Whether the core has compared compressed and other allreduces of this communicator."""

    chosen_because: str = ""
    """On the first rank, why no better engine serves the group; "" if there is none."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    @abstractmethod
    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> Completion:
        """Reduce each ``inputs[i]`` over the ranks into ``outputs[i]``.

        ``inputs[i]`` and ``outputs[i]`` have the same length, and all vectors have one dtype. An output may be its input (the
        same memory), but must not overlap it in part. ``op`` is any reduction but AVERAGE, which is a SUM with a factor, and
        ADASUM (:mod:`horovod.comm.adasum`).
        """

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> Completion:
        """As :meth:`allreduce` with a SUM of floating-point numbers, but what travels between hosts is packed blocks.

        Called only if the communicator :attr:`compresses`. The result of a vector depends on no other vector of the call.

        Args:
            form: how blocks are packed; the same on all ranks.
            errors: by vector, what earlier calls have rounded away on this rank, for error feedback.
        """
        raise TypeError(f"the engine {self.name} does not compress")

    @abstractmethod
    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> Completion:
        """Concatenate each ``inputs[i]`` over the ranks into ``outputs[i]``; ``counts[i][r]`` elements come from rank r.

        All vectors have one dtype."""

    @abstractmethod
    def broadcast(self, vectors: Vectors, root: int) -> Completion:
        """Copy each vector of group rank ``root`` into the same vector of all other ranks. The vectors may have several
        dtypes."""

    @abstractmethod
    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> Completion:
        """Send ``sent[r]`` consecutive elements of ``source`` to each rank r, itself included, in rank order. Receive
        ``received[r]`` elements from each rank r in ``target``, in rank order.

        ``source`` and ``target`` each hold one vector, or one for each rank (:func:`~horovod.comm.ranges.parts_of`), all of the
        same dtype; ranks may differ in the number of vectors. A vector of ``source`` may be longer than what is sent of it. No
        rank sends more than ``longest`` elements to any rank; ``longest`` is the same on all ranks."""

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

        All vectors have one dtype. An output may be this rank's own part of its input, and shares no other memory with it."""

    @abstractmethod
    def barrier(self) -> Completion:
        """Return when every rank of the group has called it."""

    @abstractmethod
    def abort(self) -> None:
        """Interrupt the wait of the thread that is in a collective, and all later ones. Any thread may call it, any number of
        times, even after ``close()``."""

    def may_still_read(self) -> bool:
        """After a failure: whether a library may still read vectors, so that their memory must not be freed while this process
        lives. Called on the thread that carries out collectives, or when that thread has ended."""
        return False

    def may_still_write(self) -> bool:
        """After a failure: whether a library may still read and write vectors, because it has not ended an operation in time.
        Then the script must not use them again. Called on the same threads as :meth:`may_still_read`."""
        return False

    def allocate(self, dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
        """A new vector in the kind of memory that this engine moves, filled with ``value``; uninitialized for None."""
        return host_vector(dtype, length, value)

    def follow(self, ready: Any) -> None:
        """Make all later collectives wait on the device for ``ready``, a marker of its
        :class:`~horovod.comm.device.DeviceRuntime`. Only engines for device memory have this.

        Raises:
            TypeError: the engine moves host memory.
        """
        raise TypeError(f"the engine {self.name} moves host memory, which is ready when it is handed over")

    def can_split(self) -> bool:
        """Whether this rank can call :meth:`split` now. The ranks call :meth:`split` only if this is true on all of them."""
        return False

    def split(
        self, members: Sequence[int], deadline: float, meanwhile: Callable[[], None] = lambda: None
    ) -> Communicator | None:
        """A communicator of some ranks of this one, for the same kind of memory; None if this rank is not among them.

        Every rank of this communicator must call it with the same members, after :meth:`can_split` was true on all of them.

        Args:
            members: the ranks of the new communicator, as indices in this one, in their new order.
            deadline: ``time.monotonic`` by which the call must have succeeded or failed.
            meanwhile: called from time to time while this waits for peers.

        Raises:
            DeviceFailure: the communicator cannot be made.
            Aborted: ``abort()`` was called.
            TypeError: the engine cannot split communicators.
        """
        raise TypeError(f"the engine {self.name} cannot split a communicator; build a new one for the ranks")

    def tune(self, settings: TunedSettings) -> None:
        """Apply the settings that concern this engine. All ranks call it between the same two collectives."""
        del settings  # most engines have no such setting

    def alternatives(self) -> list[str]:
        """The names of the engines among which :meth:`tune` chooses, the present one first."""
        return [self.name]

    def engines(self) -> list[str]:
        """The names of this engine and of the engines that it is composed of."""
        return [self.name]

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close. A forked child gets no mapping of shared memory."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release memory, descriptors and threads. Called once, when no collective runs."""
