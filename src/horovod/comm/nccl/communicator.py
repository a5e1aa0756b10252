"""One rank of a group over NCCL: collectives on device memory, queued on a stream of its own.

**What a collective does.** It checks nothing (the core has), puts NCCL's calls between ``ncclGroupStart`` and
``ncclGroupEnd``, which makes one kernel of them, records an event behind it and returns that event. The worker thread never
waits for the device. Small vectors of one allreduce are copied into one buffer first, and back after it, each in one step;
to reduce them one by one would take NCCL longer than the copies. Large ones are reduced where they lie.

**Streams.** All communicators of a device use one stream, so what they do is carried out in the order of the calls. Work that
must come before is named by :meth:`NcclCommunicator.follow`; what must come after waits for the event.

**Two communicators never wait for one another crosswise.** A kernel of NCCL occupies the device until all ranks of its
communicator have come to theirs. If one rank began X before Y and another Y before X, both could wait for ever. That does not
happen: the calls of all communicators are made by one thread a rank, that of the global process set, in the order of the
decisions of one coordinator, that of the global process set. Each rank's order is the coordinator's without what does not
concern it. Take the unfinished collective that the coordinator decided first: on each of its ranks all earlier ones are
finished, so it is at the head of the stream there, on all its ranks, and finishes. So none waits for ever.

**Non-blocking.** The communicator is made with ``blocking=0``: no call waits for a peer. While NCCL is still busy with one
("in progress": it connects to a peer), the caller asks from time to time, within a limit, and gives up after :meth:`abort`.

**Abort.** NCCL allows ``ncclCommAbort`` while kernels run, but not while another thread is inside a call. All calls are made
under one lock, which nobody holds while he waits. ``ncclCommAbort`` may itself take long, so a thread of its own calls it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from horovod.comm.base import Aborted, Communicator, DeviceFailure, ReductionOrder
from horovod.comm.device import DeviceRuntime, OwnedSpans
from horovod.comm.nccl import library
from horovod.comm.nccl.library import Nccl, NcclError
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Spans, Vectors, layout_of

PACKED_BYTES = 1 << 20
"""Vectors of an allreduce that are smaller travel in one buffer."""

END_SECONDS = 10.0
"""How long ``close()`` waits for an abort, or for NCCL to end in good order."""

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 5e-3
_ALIGNMENT = 16

_log = logging.getLogger("horovod.comm")


class NcclEvent:
    """The completion of a collective: a marker behind it on the communicator's stream."""

    __slots__ = ("_communicator", "_marker", "_runtime")

    def __init__(self, communicator: NcclCommunicator, runtime: DeviceRuntime, marker: Any) -> None:
        self._communicator = communicator
        self._runtime = runtime
        self._marker = marker

    def query(self) -> bool:
        return self._runtime.query(self._marker)

    def wait(self) -> None:
        with self._runtime.chosen():
            self._runtime.wait(self._runtime.current_stream(), self._marker)

    def error(self) -> BaseException | None:
        return self._communicator.failure()


class NcclCommunicator(Communicator):
    """One rank of a group over NCCL.

    Args:
        runtime: the device; ``stream`` is one of its streams, which all communicators of the device share.
        unique_id: made on one rank, the same on all.
        deadline: ``time.monotonic`` by which all ranks must have called this.
        limit: seconds that NCCL may be busy with one call.

    Raises:
        NcclError: it cannot be made.
    """

    name: ClassVar[str] = "nccl"
    any_thread: ClassVar[bool] = False
    reduction_order: ClassVar[ReductionOrder] = ReductionOrder.FREE

    def __init__(
        self,
        rank: int,
        size: int,
        nccl: Nccl,
        runtime: DeviceRuntime,
        stream: Any,
        unique_id: bytes,
        deadline: float,
        limit: float,
    ) -> None:
        super().__init__(rank, size)
        self._nccl = nccl
        self._c = nccl.functions
        self._runtime = runtime
        self._stream = stream
        self._address = runtime.stream_address(stream)
        self._limit = limit
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # taken for good by whoever begins the end, an abort or a close
        self._aborting = False
        self._aborted = threading.Event()
        self._closed = False
        self._factors: dict[tuple[np.dtype[Any], float], int] = {}
        self._scratch: OwnedSpans | None = None
        made = ctypes.c_void_p()
        config = library.Config.non_blocking()
        identity = library.UniqueId.from_buffer_copy(unique_id)
        with runtime.chosen():
            result = self._c.ncclCommInitRankConfig(ctypes.byref(made), size, identity, rank, ctypes.byref(config))
            if result not in (library.SUCCESS, library.IN_PROGRESS) or not made.value:
                raise NcclError(f"ncclCommInitRankConfig: {nccl.words(result)}")
            self._comm: int = made.value
            try:
                self._settle("ncclCommInitRankConfig", result, deadline)
            except BaseException:
                self.abort()
                self.close()
                raise

    # Collectives

    def follow(self, ready: Any) -> None:
        self._runtime.wait(self._stream, ready)

    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> NcclEvent:
        sources, targets = _spans(inputs), _spans(outputs)
        dtype = sources.layout.dtype
        lengths = sources.layout.sizes
        small = [n for n, length in enumerate(lengths) if 0 < length * dtype.itemsize < PACKED_BYTES]
        if len(small) < 2:
            small = []
        apart = [n for n, length in enumerate(lengths) if length and n not in set(small)]
        with self._runtime.chosen():
            operation = self._operation(op, dtype, prescale, postscale)
            calls = [(sources.addresses[n], targets.addresses[n], lengths[n]) for n in apart]
            packed = self._pack(sources, small)
            if packed is not None:
                room, length = packed
                calls.append((room.addresses[0], room.addresses[0], length))
            with self._group():
                for source, target, count in calls:
                    self._call(
                        "ncclAllReduce",
                        source,
                        target,
                        count,
                        library.DATA_TYPES[dtype],
                        operation,
                        self._comm,
                        self._address,
                    )
            if packed is not None:
                self._runtime.copy(self._stream, packed[0], _some(targets, small))
            return self._event()

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> NcclEvent:
        sources, targets = _spans(inputs), _spans(outputs)
        itemsize = sources.layout.dtype.itemsize
        with self._runtime.chosen():
            with self._group():
                for source, target, of in zip(sources.addresses, targets.addresses, counts, strict=True):
                    lengths = [count * itemsize for count in of]
                    if not any(lengths):
                        continue
                    if len(set(lengths)) == 1:
                        self._call(
                            "ncclAllGather", source, target, lengths[0], library.BYTES, self._comm, self._address
                        )
                        continue
                    for root, (start, length) in enumerate(_places(target, lengths)):
                        if length:
                            own = source if root == self.rank else start
                            self._call(
                                "ncclBroadcast", own, start, length, library.BYTES, root, self._comm, self._address
                            )
            return self._event()

    def broadcast(self, vectors: Vectors, root: int) -> NcclEvent:
        with self._runtime.chosen():
            with self._group():
                for spans in _of_each_type(vectors):
                    for address, length in zip(spans.addresses, spans.layout.lengths.tolist(), strict=True):
                        if length:
                            self._call(
                                "ncclBroadcast",
                                address,
                                address,
                                length,
                                library.BYTES,
                                root,
                                self._comm,
                                self._address,
                            )
            return self._event()

    def alltoall(
        self, source: Vectors, target: Vectors, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NcclEvent:
        sources, targets = _spans(source), _spans(target)
        itemsize = sources.layout.dtype.itemsize
        sent = _places(sources.addresses[0], [count * itemsize for count in send_counts])
        received = _places(targets.addresses[0], [count * itemsize for count in receive_counts])
        with self._runtime.chosen():
            with self._group():
                for peer, (start, length) in enumerate(sent):
                    if length:
                        self._call("ncclSend", start, length, library.BYTES, peer, self._comm, self._address)
                for peer, (start, length) in enumerate(received):
                    if length:
                        self._call("ncclRecv", start, length, library.BYTES, peer, self._comm, self._address)
            return self._event()

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
        with self._runtime.chosen():
            operation = self._operation(op, dtype, prescale, postscale)
            with self._group():
                for source, target, of in zip(sources.addresses, targets.addresses, counts, strict=True):
                    if not any(of):
                        continue
                    if len(set(of)) == 1:
                        self._call(
                            "ncclReduceScatter", source, target, of[0], kind, operation, self._comm, self._address
                        )
                        continue
                    for root, (start, length) in enumerate(_places(source, [count * dtype.itemsize for count in of])):
                        if length:
                            own = target if root == self.rank else start  # others receive nothing
                            self._call(
                                "ncclReduce", start, own, of[root], kind, operation, root, self._comm, self._address
                            )
            return self._event()

    def barrier(self) -> NcclEvent:
        with self._runtime.chosen():
            word = self._runtime.allocate(np.dtype(np.int32), 1, self._stream, 0)
            address = word.addresses[0]
            with self._group():
                kind = library.DATA_TYPES[word.layout.dtype]
                self._call("ncclAllReduce", address, address, 1, kind, 0, self._comm, self._address)
            return self._event()

    def allocate(self, dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
        with self._runtime.chosen():
            return self._runtime.allocate(dtype, length, self._stream, value)

    # The end

    def failure(self) -> BaseException | None:
        """What has gone wrong with this communicator, as far as NCCL knows by now. Any thread; never waits."""
        if self._ending.locked():  # an end in good order waits for what the device is at
            return Aborted("the communicator was aborted") if self._aborting else None
        if not self._lock.acquire(blocking=False):
            return None  # a call is being made, which finds out itself
        try:
            state = self._nccl.async_error(self._comm)
            if state in (library.SUCCESS, library.IN_PROGRESS):
                return None
            return NcclError(self._nccl.words(state, self._comm))
        except NcclError as error:
            return error
        finally:
            self._lock.release()

    def abort(self) -> None:
        if self._ending.acquire(blocking=False):
            self._begin_abort()

    def _begin_abort(self) -> None:
        self._aborting = True
        threading.Thread(target=self._abort, name="horovod-nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        with self._lock, self._runtime.chosen():  # a call takes microseconds, as it waits for nobody
            result = self._c.ncclCommAbort(self._comm)
        if result not in (library.SUCCESS, library.IN_PROGRESS):
            _log.warning("ncclCommAbort: %s", self._nccl.words(result))
        self._aborted.set()

    def close(self) -> None:
        """Give everything back: in good order when all ranks do the same, or after an abort. Waits for that a while."""
        if self._closed:
            return
        in_good_order = False
        if self._ending.acquire(blocking=False):
            try:
                self._finish()
                in_good_order = True
            except DeviceFailure as error:
                _log.warning("NCCL did not end in good order: %s", error)
                self._begin_abort()
        if not in_good_order and not self._aborted.wait(END_SECONDS):
            _log.error(
                "rank %d of the group: ncclCommAbort did not return within %g seconds; %s may still be at work, so end this "
                "process instead of using its memory again",
                self.rank,
                END_SECONDS,
                self._runtime.device,
            )
        self._closed = True
        self._scratch = None

    def _finish(self) -> None:
        with self._runtime.chosen():
            for operation in self._factors.values():
                self._call("ncclRedOpDestroy", operation, self._comm)
            with self._lock:
                result = self._c.ncclCommFinalize(self._comm)
            self._settle("ncclCommFinalize", result, time.monotonic() + END_SECONDS)
            with self._lock:
                result = self._c.ncclCommDestroy(self._comm)
            if result != library.IN_PROGRESS:
                self._nccl.check("ncclCommDestroy", result)

    # Calls

    def _call(self, name: str, *arguments: Any) -> None:
        """One call, whose result shows at once or at the end of the group."""
        result = getattr(self._c, name)(*arguments)
        if result not in (library.SUCCESS, library.IN_PROGRESS):
            raise NcclError(f"{name}: {self._nccl.words(result, self._comm)}")

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Between ``ncclGroupStart`` and ``ncclGroupEnd``, under the lock; then wait until NCCL has queued it all."""
        with self._lock:
            if self._aborting:
                raise Aborted
            self._nccl.check("ncclGroupStart", self._c.ncclGroupStart())
            try:
                yield
            finally:  # also after an error, as the bracket is the thread's and not the communicator's
                result = self._c.ncclGroupEnd()
        self._settle("ncclGroupEnd", result, time.monotonic() + self._limit)

    def _settle(self, call: str, result: int, deadline: float) -> None:
        """Return when NCCL is no longer busy with a call that returned ``result``."""
        if result not in (library.SUCCESS, library.IN_PROGRESS):
            raise NcclError(f"{call}: {self._nccl.words(result, self._comm)}")
        pause = _FIRST_PAUSE
        while result == library.IN_PROGRESS:
            with self._lock:
                if self._aborting:
                    raise Aborted
                result = self._nccl.async_error(self._comm)
            if result == library.SUCCESS:
                return
            if result != library.IN_PROGRESS:
                raise NcclError(f"{call}: {self._nccl.words(result, self._comm)}")
            if time.monotonic() > deadline:
                raise NcclError(
                    f"{call}: NCCL is still busy after the limit; a rank did not come to it, or the ranks cannot reach one "
                    "another (NCCL_DEBUG=INFO shows by which interfaces they try, NCCL_SOCKET_IFNAME chooses)"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _operation(self, op: ReduceOp, dtype: np.dtype[Any], prescale: float, postscale: float) -> int:
        """NCCL's number of a reduction with its factors, which become one: a sum of scaled inputs is the scaled sum."""
        factor = prescale * postscale
        if factor == 1.0:
            return library.OPERATIONS[op]
        if op is not ReduceOp.SUM:
            raise NcclError(f"NCCL has no {op.label} with factors")
        if prescale == 1.0 and postscale == 1.0 / self.size:
            return library.AVERAGE
        known = self._factors.get((dtype, factor))
        if known is None:
            made = ctypes.c_int()
            value = library.scalar(factor, dtype)
            with self._lock:
                if self._aborting:
                    raise Aborted
                result = self._c.ncclRedOpCreatePreMulSum(
                    ctypes.byref(made),
                    ctypes.cast(value, ctypes.c_void_p),
                    library.DATA_TYPES[dtype],
                    library.residence(),
                    self._comm,
                )
            self._nccl.check("ncclRedOpCreatePreMulSum", result, self._comm)
            known = self._factors[dtype, factor] = made.value
        return known

    def _pack(self, sources: Spans, chosen: Sequence[int]) -> tuple[Spans, int] | None:
        """Copy some vectors into the buffer, one after another.

        Returns:
            Where each of them lies there, and how many elements that is in all; None for no vectors.
        """
        if not chosen:
            return None
        layout = sources.layout
        step = max(1, _ALIGNMENT // layout.dtype.itemsize)
        sizes = [layout.sizes[n] for n in chosen]
        starts, length = [], 0
        for size in sizes:
            starts.append(length)
            length += -(-size // step) * step
        wanted = length * layout.dtype.itemsize
        if self._scratch is None or self._scratch.layout.nbytes < wanted:
            # Zeros, as what lies between the vectors is reduced too. The smaller buffer may serve others on the same stream.
            room = 1 << max(16, (wanted - 1).bit_length())
            self._scratch = self._runtime.allocate(np.dtype(np.uint8), room, self._stream, 0)
        base = self._scratch.addresses[0]
        places = [base + start * layout.dtype.itemsize for start in starts]
        room_for = Spans(layout_of(layout.dtype, tuple(sizes), layout.device), places)
        self._runtime.copy(self._stream, _some(sources, chosen), room_for)
        return room_for, length

    def _event(self) -> NcclEvent:
        return NcclEvent(self, self._runtime, self._runtime.record(self._stream))


def _spans(vectors: Vectors) -> Spans:
    if not isinstance(vectors, Spans):
        raise TypeError("arrays in host memory were handed to an engine for device memory")
    return vectors


def _of_each_type(vectors: Vectors) -> Sequence[Spans]:
    """Vectors as spans: one, or where they are of several types one of each."""
    if isinstance(vectors, Spans):
        return [vectors]
    several: Sequence[Any] = vectors
    return [_spans(each) for each in several]


def _some(spans: Spans, chosen: Sequence[int]) -> Spans:
    layout = spans.layout
    sizes = tuple([layout.sizes[n] for n in chosen])
    return Spans(layout_of(layout.dtype, sizes, layout.device), [spans.addresses[n] for n in chosen])


def _places(start: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Address and length, in bytes, of consecutive parts."""
    found = []
    for length in lengths:
        found.append((start, length))
        start += length
    return found
