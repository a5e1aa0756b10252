"""One rank of a group over NCCL: collectives on device memory, queued on the engine's own stream of the device.

**What a collective does.** It checks nothing (the core has). It puts NCCL's calls between ``ncclGroupStart`` and
``ncclGroupEnd``, which makes one kernel of them, and returns an event that completes after the kernel. The worker thread never
waits for the device. Small vectors of one allreduce are copied into one buffer first, and back afterwards, each in one step:
NCCL takes longer to reduce them one by one than the copies take. Large vectors are reduced without a copy.

**Streams.** All communicators of a device use one stream, so the device carries out their collectives in the order of the
calls. :meth:`NcclCommunicator.follow` names the work that must come before; work that must come after waits for the event.

**Two communicators never deadlock.** A kernel of NCCL occupies the device until all ranks of its communicator have started
theirs. If one rank began X before Y and another Y before X, both could wait forever. That does not happen: on each rank one
thread, that of the global process set, makes the calls of all communicators, in the order in which one coordinator, that of the
global process set, decided them. Each rank carries out that order without the collectives that it takes no part in. Take the
unfinished collective that the coordinator decided first: on each of its ranks all earlier ones are finished, so it is at the
head of the stream on all of its ranks, and finishes. So none waits forever.

:mod:`horovod.comm.nccl.handle` has the rules by which NCCL is called and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.device import DeviceRuntime, OwnedSpans
from horovod.comm.nccl import library
from horovod.comm.nccl.factors import Scaling, scaling
from horovod.comm.nccl.handle import CommHandle, Meanwhile, nothing
from horovod.comm.nccl.library import NcclError
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Layout, Spans, Vectors, layout_of

PACKED_BYTES = 1 << 20
"""Vectors of an allreduce with fewer bytes are copied into one buffer."""

_ALIGNMENT = 16


_Call: TypeAlias = tuple[Any, ...]
"""The name of a function of NCCL, and its arguments without the last two, the communicator and the stream."""


class NcclEvent:
    """The completion of a collective: markers before and after it on the communicator's stream.

    Args:
        handle: the communicator; the event takes the collective's number in it.
        runtime: the device.
        begin, end: the markers.
        held: temporary memory of the collective, which the event keeps alive.
    """

    __slots__ = ("_begin", "_end", "_handle", "_held", "_number", "_runtime")

    def __init__(self, handle: CommHandle, runtime: DeviceRuntime, begin: Any, end: Any, held: object) -> None:
        self._handle = handle
        self._runtime = runtime
        self._begin = begin
        self._end = end
        self._held = held
        handle.queued += 1
        self._number = handle.queued

    def begun(self) -> bool:
        return self._runtime.query(self._begin)

    def query(self) -> bool:
        return self._runtime.query(self._end)

    def wait(self) -> None:
        with self._runtime.chosen():
            self._runtime.wait(self._runtime.current_stream(), self._end)

    def error(self) -> BaseException | None:
        return None if self._number <= self._handle.over else self._handle.failure()

    def was_right(self) -> bool:
        """Whether the collective has completed without an error. Then all earlier ones have succeeded, too."""
        if not self.query() or self._handle.failure() is not None:
            return False
        self._handle.over = max(self._handle.over, self._number)
        return True


class NcclCommunicator(Communicator):
    """One rank of a group over NCCL.

    Args:
        rank, size: this rank's index in the group, and the size of the group.
        handle: NCCL's communicator of the same ranks, which this object owns from now on.
        runtime: the device.
        stream: the stream that all communicators of the device share.
    """

    name: ClassVar[str] = "nccl"
    any_thread = False

    def __init__(self, rank: int, size: int, handle: CommHandle, runtime: DeviceRuntime, stream: Any) -> None:
        super().__init__(rank, size)
        self._handle = handle
        self._runtime = runtime
        self._stream = stream
        self._address = runtime.stream_address(stream)
        self._latest: NcclEvent | None = None
        self._scratch: OwnedSpans | None = None

    # Collectives

    def follow(self, ready: Any) -> None:
        self._runtime.wait(self._stream, ready)

    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> NcclEvent:
        sources, targets = _spans(inputs), _spans(outputs)
        dtype, lengths = sources.layout.dtype, sources.layout.sizes
        kind = library.DATA_TYPES[dtype]
        small = [n for n, length in enumerate(lengths) if 0 < length * dtype.itemsize < PACKED_BYTES]
        if len(small) < 2:
            small = []
        apart = [n for n, length in enumerate(lengths) if length and n not in set(small)]
        with self._runtime.chosen():
            scaled, factor, operation = self._reduction(op, dtype, prescale * postscale)
            ends = _some(targets, apart)
            begins = _some(sources, apart)
            if scaled is Scaling.BEFORE:
                self._runtime.scale(self._stream, begins, ends, factor)
                begins = ends
            calls: list[_Call] = [
                ("ncclAllReduce", source, target, length, kind, operation)
                for source, target, length in zip(begins.addresses, ends.addresses, ends.layout.sizes, strict=True)
            ]
            packed: Spans | None = None
            if small:
                packed, length = self._pack(sources, small)
                if scaled is Scaling.BEFORE:
                    self._runtime.scale(self._stream, packed, packed, factor)
                start = packed.addresses[0]
                calls.append(("ncclAllReduce", start, start, length, kind, operation))

            def then() -> None:
                for reduced in (ends, packed):
                    if reduced is not None and scaled is Scaling.AFTER:
                        self._runtime.scale(self._stream, reduced, reduced, factor)
                if packed is not None:
                    self._runtime.copy(self._stream, packed, _some(targets, small))

            return self._carry_out(calls, then)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> NcclEvent:
        sources, targets = _spans(inputs), _spans(outputs)
        itemsize = sources.layout.dtype.itemsize
        calls: list[_Call] = []
        for source, target, of in zip(sources.addresses, targets.addresses, counts, strict=True):
            lengths = [count * itemsize for count in of]
            if not any(lengths):
                continue
            if len(set(lengths)) == 1:
                calls.append(("ncclAllGather", source, target, lengths[0], library.BYTES))
                continue
            for root, (start, length) in enumerate(_ranges(target, lengths)):
                if length:
                    own = source if root == self.rank else start
                    calls.append(("ncclBroadcast", own, start, length, library.BYTES, root))
        return self._carry_out(calls)

    def broadcast(self, vectors: Vectors, root: int) -> NcclEvent:
        return self._carry_out(
            [
                ("ncclBroadcast", address, address, length, library.BYTES, root)
                for spans in _of_each_type(vectors)
                for address, length in zip(spans.addresses, spans.layout.lengths.tolist(), strict=True)
                if length
            ]
        )

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> NcclEvent:
        sources, targets = _spans(source), _spans(target)
        itemsize = sources.layout.dtype.itemsize
        calls: list[_Call] = []
        for name, addresses, counts in (
            ("ncclSend", sources.addresses, sent),
            ("ncclRecv", targets.addresses, received),
        ):
            lengths = [each * itemsize for each in counts]
            parts = _ranges(addresses[0], lengths) if len(addresses) == 1 else zip(addresses, lengths, strict=True)
            for peer, (start, length) in enumerate(parts):
                if length:
                    calls.append((name, start, length, library.BYTES, peer))
        return self._carry_out(calls)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> NcclEvent:
        sources, targets = _spans(inputs), _spans(outputs)
        dtype = sources.layout.dtype
        kind = library.DATA_TYPES[dtype]
        held: OwnedSpans | None = None
        calls: list[_Call] = []
        with self._runtime.chosen():
            scaled, factor, operation = self._reduction(op, dtype, prescale * postscale)
            if scaled is Scaling.BEFORE:  # the inputs stay as they are
                held = self._runtime.allocate(dtype, sum(sources.layout.sizes), self._stream)
                sources = Spans(sources.layout, _consecutive(held.addresses[0], sources.layout))
                self._runtime.scale(self._stream, _spans(inputs), sources, factor)
        for source, target, of in zip(sources.addresses, targets.addresses, counts, strict=True):
            if not any(of):
                continue
            if len(set(of)) == 1:
                calls.append(("ncclReduceScatter", source, target, of[0], kind, operation))
                continue
            for root, (start, length) in enumerate(_ranges(source, [count * dtype.itemsize for count in of])):
                if length:
                    own = target if root == self.rank else start  # only the root receives
                    calls.append(("ncclReduce", start, own, of[root], kind, operation, root))

        def then() -> None:
            if scaled is Scaling.AFTER:
                self._runtime.scale(self._stream, targets, targets, factor)

        return self._carry_out(calls, then, held)

    def barrier(self) -> NcclEvent:
        with self._runtime.chosen():
            flag = self._runtime.allocate(np.dtype(np.int32), 1, self._stream, 0)
        address = flag.addresses[0]
        calls: list[_Call] = [("ncclAllReduce", address, address, 1, library.DATA_TYPES[flag.layout.dtype], 0)]
        return self._carry_out(calls, held=flag)

    def _carry_out(self, calls: Sequence[_Call], then: Callable[[], None] = nothing, held: object = None) -> NcclEvent:
        """Queue these calls as one kernel, followed by the work that ``then`` queues.

        Args:
            held: temporary memory of the collective.
        """
        with self._runtime.chosen():
            begin = self._runtime.record(self._stream)
            with self._handle.group():
                for name, *arguments in calls:
                    self._handle.call(name, *arguments, self._handle.address, self._address)
            then()
            self._latest = NcclEvent(self._handle, self._runtime, begin, self._runtime.record(self._stream), held)
            return self._latest

    def allocate(self, dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
        with self._runtime.chosen():
            return self._runtime.allocate(dtype, length, self._stream, value)

    # Parts

    def can_split(self) -> bool:
        return self._latest is None or self._latest.was_right()

    def split(self, members: Sequence[int], deadline: float, meanwhile: Meanwhile = nothing) -> NcclCommunicator | None:
        rank = members.index(self.rank) if self.rank in members else -1
        handle = self._handle.split(None if rank < 0 else 0, max(rank, 0), deadline, meanwhile)
        if handle is None:
            return None
        return NcclCommunicator(rank, len(members), handle, self._runtime, self._stream)

    # The end

    def abort(self) -> None:
        self._handle.abort()

    def close(self) -> None:
        self._handle.close()
        self._latest = None
        self._scratch = None

    def _reduction(self, op: ReduceOp, dtype: np.dtype[Any], factor: float) -> tuple[Scaling, float, int]:
        """When a kernel of the framework multiplies, the factor, and NCCL's reduction.

        ``factor`` is the product of the pre- and postscale factors: a sum of scaled inputs is the scaled sum."""
        if factor == 1.0:
            return Scaling.NOT, factor, library.OPERATIONS[op]
        if op is not ReduceOp.SUM:
            raise NcclError(f"NCCL has no {op.label} with factors")
        scaled = scaling(dtype, factor)
        if scaled is not Scaling.NOT:
            return scaled, factor, library.OPERATIONS[op]
        average = factor == 1.0 / self.size
        return Scaling.NOT, factor, library.AVERAGE if average else self._handle.multiplied_sum(dtype, factor)

    def _pack(self, sources: Spans, chosen: Sequence[int]) -> tuple[Spans, int]:
        """Copy the vectors with the indices ``chosen`` into the buffer, one after another.

        Returns:
            The vectors in the buffer, and the number of elements from the first to the last, with the padding.
        """
        layout = sources.layout
        step = max(1, _ALIGNMENT // layout.dtype.itemsize)
        sizes = [layout.sizes[n] for n in chosen]
        starts, length = [], 0
        for size in sizes:
            starts.append(length)
            length += -(-size // step) * step
        wanted = length * layout.dtype.itemsize
        if self._scratch is None or self._scratch.layout.nbytes < wanted:
            # Zeros, since NCCL reduces the padding between the vectors, too. Later work of the stream may reuse the old buffer.
            room = 1 << max(16, (wanted - 1).bit_length())
            self._scratch = self._runtime.allocate(np.dtype(np.uint8), room, self._stream, 0)
        base = self._scratch.addresses[0]
        addresses = [base + start * layout.dtype.itemsize for start in starts]
        room_for = Spans(layout_of(layout.dtype, tuple(sizes), layout.device), addresses)
        self._runtime.copy(self._stream, _some(sources, chosen), room_for)
        return room_for, length


def _spans(vectors: Vectors) -> Spans:
    if not isinstance(vectors, Spans):
        raise TypeError("arrays in host memory were handed to an engine for device memory")
    return vectors


def _of_each_type(vectors: Vectors) -> Sequence[Spans]:
    """Vectors as spans of one type each."""
    if isinstance(vectors, Spans):
        return [vectors]
    several: Sequence[Any] = vectors
    return [_spans(each) for each in several]


def _some(spans: Spans, chosen: Sequence[int]) -> Spans:
    layout = spans.layout
    sizes = tuple([layout.sizes[n] for n in chosen])
    return Spans(layout_of(layout.dtype, sizes, layout.device), [spans.addresses[n] for n in chosen])


def _consecutive(start: int, layout: Layout) -> list[int]:
    """The addresses of a layout's vectors, one after another, in a buffer that begins at address ``start``."""
    return [address for address, _ in _ranges(start, layout.lengths.tolist())]


def _ranges(start: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The addresses of consecutive parts of these lengths, each with its length; all in bytes."""
    found = []
    for length in lengths:
        found.append((start, length))
        start += length
    return found
