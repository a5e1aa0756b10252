"""The calls that reach NCCL, on a library that carries them out late and tells of every breach of its rules."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from horovod.comm.base import Aborted, DeviceFailure
from horovod.comm.datatypes import Array
from horovod.comm.nccl import communicator as module
from horovod.comm.nccl.communicator import NcclCommunicator, NcclEvent
from horovod.comm.nccl.handle import SUMS, CommHandle
from horovod.comm.nccl.library import Nccl
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Spans, address_of, layout_of
from recorded_nccl import RecordedNccl, RecordingRuntime, Stream
from time_limits import SOON

_T = TypeVar("_T")
SECONDS = SOON
TYPES = [
    np.dtype(each) for each in (np.uint8, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
]


class Device:
    """One rank's library, device and streams."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.library = RecordedNccl(self.streams.__getitem__)
        self.nccl = Nccl(self.library, "recorded")
        self.runtime = RecordingRuntime("recorded:0", self.streams)
        self.stream = self.runtime.new_stream()
        self.made: list[NcclCommunicator] = []

    def communicator(self, rank: int, size: int, identity: bytes, limit: float = SECONDS) -> NcclCommunicator:
        deadline = time.monotonic() + SECONDS
        handle = CommHandle.create(self.nccl, self.runtime, rank, size, identity, deadline, limit)
        made = NcclCommunicator(rank, size, handle, self.runtime, self.stream)
        self.made.append(made)
        return made

    def end(self) -> list[str]:
        for each in self.made:
            each.close()
        return self.library.breaches

    def spans(self, arrays: Sequence[Array]) -> Spans:
        layout = layout_of(arrays[0].dtype, tuple(array.size for array in arrays), self.runtime.device)
        return Spans(layout, [address_of(array) for array in arrays])


def run_ranks(size: int, function: Callable[[Device, NcclCommunicator], _T]) -> list[_T]:
    """``function`` on every rank, each a thread with a device of its own; fails on any breach of NCCL's rules."""
    identity, found, errors = os.urandom(128), dict[int, _T](), list[BaseException]()
    breaches: list[str] = []

    def run(rank: int) -> None:
        device = Device()
        try:
            found[rank] = function(device, device.communicator(rank, size, identity))
        except BaseException as error:
            errors.append(error)
            for each in device.made:
                each.abort()
        finally:
            breaches.extend(device.end())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    if errors:
        raise errors[0]
    assert breaches == []
    return [found[rank] for rank in range(size)]


def await_(event: NcclEvent) -> None:
    deadline = time.monotonic() + SECONDS
    while not event.query():
        assert event.error() is None and time.monotonic() < deadline
        time.sleep(0.001)


def whole(dtype: np.dtype[Any], length: int, rank: int) -> Array:
    """Small whole numbers, whose sums every type has exactly."""
    return ((np.arange(length) * 3 + rank) % 5).astype(dtype)


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    yield
    deadline = time.monotonic() + SECONDS
    while any(thread.name.startswith("recorded") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_allreduce_of_vectors_of_all_sizes(size: int, op: ReduceOp) -> None:
    lengths = [3, 0, 17, module.PACKED_BYTES // 2, 1]
    fold = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]

    def run(device: Device, communicator: NcclCommunicator) -> None:
        for dtype in TYPES:
            inputs = [whole(dtype, length, communicator.rank) for length in lengths]
            outputs = [np.full(length, 9).astype(dtype) for length in lengths]
            await_(communicator.allreduce(device.spans(inputs), device.spans(outputs), op, 1.0, 1.0))
            for length, given, found in zip(lengths, inputs, outputs, strict=True):
                wanted = whole(dtype, length, 0)
                for rank in range(1, size):
                    wanted = fold(wanted, whole(dtype, length, rank))
                assert np.array_equal(found, wanted), dtype
                assert np.array_equal(given, whole(dtype, length, communicator.rank))

    run_ranks(size, run)


def test_small_vectors_travel_in_one_call_and_large_ones_where_they_lie() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> list[tuple[Any, ...]]:
        arrays = [np.ones(length, np.float32) for length in (5, module.PACKED_BYTES // 4, 9)]
        spans = device.spans(arrays)
        await_(communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0))
        assert all((array == 2).all() for array in arrays)
        return [call for call in device.library.calls if call[0] == "allreduce"]

    for calls in run_ranks(2, run):
        assert sorted(call[2] for call in calls) == [20, module.PACKED_BYTES // 4]  # 5 and 9 to multiples of 4 elements


@pytest.mark.parametrize(("prescale", "postscale"), [(1.0, 0.5), (0.5, 1.0), (4.0, 0.25), (2.0, 0.25), (0.5, 3.0)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_averages_and_factors_are_part_of_the_sum(prescale: float, postscale: float, dtype: Any) -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        for _ in range(2):  # what is made for a factor serves again
            array = whole(np.dtype(dtype), 50, communicator.rank)
            spans = device.spans([array])
            await_(communicator.allreduce(spans, spans, ReduceOp.SUM, prescale, postscale))
            wanted = (whole(np.dtype(np.float64), 50, 0) + whole(np.dtype(np.float64), 50, 1)) * prescale * postscale
            assert np.array_equal(array.astype(np.float64), wanted)

    run_ranks(2, run)


@pytest.mark.parametrize("factor", [1e-8, 1e5, 1 / 3, -0.1, 1e-3])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_factors_that_16_bits_do_not_hold_are_multiplied_by_the_device(dtype: Any, factor: float) -> None:
    """Whatever the sizes of the vectors: alone, together, in place or not; the inputs stay."""
    lengths = [5, 0, module.PACKED_BYTES, 9]

    def run(device: Device, communicator: NcclCommunicator) -> None:
        each = 64.0 if abs(factor) < 1 else 2.0**-10

        def given(length: int) -> Array:
            return (np.ones(length) * (communicator.rank + 1) * each).astype(dtype)

        for in_place in (True, False):
            inputs = [given(length) for length in lengths]
            outputs = inputs if in_place else [np.zeros(length, dtype) for length in lengths]
            await_(communicator.allreduce(device.spans(inputs), device.spans(outputs), ReduceOp.SUM, 1.0, factor))
            for length, source, found in zip(lengths, inputs, outputs, strict=True):
                assert np.allclose(found.astype(np.float64), 3 * each * factor, rtol=6e-3, atol=2e-7)
                assert in_place or np.array_equal(source, given(length))
        source, target = given(7), np.zeros([4, 3][communicator.rank], dtype)
        counts = [[4, 3]]
        await_(
            communicator.reducescatter(
                device.spans([source]), device.spans([target]), counts, ReduceOp.SUM, factor, 1.0
            )
        )
        assert np.allclose(target.astype(np.float64), 3 * each * factor, rtol=6e-3, atol=2e-7)
        assert np.array_equal(source, given(7))

    run_ranks(2, run)


def test_sums_with_a_factor_are_given_back_when_there_are_many() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        for turn in range(SUMS + 5):
            array = np.ones(3, np.float32)
            spans = device.spans([array])
            await_(communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, turn + 2.5))
            assert (array == 2 * (turn + 2.5)).all()
        assert len(device.library.comms[1].factors) == SUMS

    run_ranks(2, run)


@pytest.mark.parametrize("counts", [[4, 4, 4], [0, 5, 2], [0, 0, 0], [3, 0, 0]])
def test_allgather_of_different_counts(counts: list[int]) -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        for dtype in [*TYPES, np.dtype(np.int16), np.dtype(np.complex128), np.dtype(bool)]:
            inputs = [whole(dtype, counts[communicator.rank], communicator.rank), whole(dtype, 2, communicator.rank)]
            outputs = [np.zeros(sum(counts), dtype), np.zeros(6, dtype)]
            await_(communicator.allgather(device.spans(inputs), device.spans(outputs), [counts, [2, 2, 2]]))
            wanted = np.concatenate([whole(dtype, count, rank) for rank, count in enumerate(counts)])
            assert np.array_equal(outputs[0], wanted)
            assert np.array_equal(outputs[1], np.concatenate([whole(dtype, 2, rank) for rank in range(3)]))

    run_ranks(3, run)


def test_broadcast_of_several_types() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        for root in range(3):
            arrays = [whole(np.dtype(np.float16), 4, communicator.rank), whole(np.dtype(bool), 7, communicator.rank)]
            several: Any = [device.spans([array]) for array in arrays]
            await_(communicator.broadcast(several, root))
            assert np.array_equal(arrays[0], whole(np.dtype(np.float16), 4, root))
            assert np.array_equal(arrays[1], whole(np.dtype(bool), 7, root))

    run_ranks(3, run)


@pytest.mark.parametrize("splits", [[[1, 2, 3], [0, 0, 0], [4, 0, 1]], [[2] * 3] * 3, [[0] * 3] * 3, [[5, 0, 0]] * 3])
def test_alltoall_with_splits(splits: list[list[int]]) -> None:
    """Rank 0 passes one vector for each rank, rank 1 one vector for all, rank 2 one of each."""

    def run(device: Device, communicator: NcclCommunicator) -> None:
        me = communicator.rank
        received = [row[me] for row in splits]
        source = whole(np.dtype(np.float32), sum(splits[me]) + 2, me)
        sources = [source] if me else np.split(source[: sum(splits[me])], np.cumsum(splits[me])[:-1])
        targets = [np.zeros(each, np.float32) for each in ([sum(received)] if me == 1 else received)]
        longest = max(map(max, splits))
        await_(communicator.alltoall(device.spans(sources), device.spans(targets), splits[me], received, longest))
        parts = []
        for rank, row in enumerate(splits):
            start = sum(row[:me])
            parts.append(whole(np.dtype(np.float32), sum(row) + 2, rank)[start : start + row[me]])
        assert np.array_equal(np.concatenate(targets), np.concatenate(parts))

    run_ranks(3, run)


@pytest.mark.parametrize("counts", [[4, 4, 4], [5, 4, 4], [1, 0, 0], [0, 0, 0]])
def test_reducescatter_of_different_counts(counts: list[int]) -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        me, total = communicator.rank, sum(counts)
        source, target = whole(np.dtype(np.float32), total, me), np.zeros(counts[me], np.float32)
        spans = device.spans([source])
        await_(communicator.reducescatter(spans, device.spans([target]), [counts], ReduceOp.SUM, 1.0, 0.5))
        start = sum(counts[:me])
        wanted = sum(whole(np.dtype(np.float32), total, rank) for rank in range(3)) * 0.5
        assert np.array_equal(target, wanted[start : start + counts[me]])
        assert np.array_equal(source, whole(np.dtype(np.float32), total, me))

    run_ranks(3, run)


def test_a_collective_runs_after_its_marker_and_before_its_event() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        runtime = device.runtime
        array, seen = np.zeros(8, np.float32), np.zeros(8, np.float32)
        gate = threading.Event()
        runtime.current.push(lambda: assert_true(gate.wait(SECONDS)))
        runtime.current.push(lambda: array.fill(communicator.rank + 1))
        communicator.follow(runtime.record(runtime.current))
        event = communicator.allreduce(device.spans([array]), device.spans([array]), ReduceOp.SUM, 1.0, 1.0)
        assert not event.query() and event.error() is None
        event.wait()  # the host does not wait
        runtime.current.push(lambda: np.copyto(seen, array))
        last = runtime.record(runtime.current)
        time.sleep(0.3)  # who does not wait for the gate is done by now
        assert not event.query() and not seen.any()
        gate.set()
        assert last.reached.wait(SECONDS) and seen.tolist() == [3.0] * 8 and event.query()

    run_ranks(2, run)


def assert_true(value: object) -> None:
    assert value


def test_barrier_is_over_when_all_have_come() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        if communicator.rank:
            time.sleep(0.1)
        await_(communicator.barrier())

    run_ranks(2, run)


def test_communicators_of_one_device_work_in_the_order_of_the_calls() -> None:
    """Of all ranks, and of two pairs, which overlap with it in every rank."""
    pair = {0: os.urandom(128), 1: os.urandom(128)}

    def run(device: Device, everybody: NcclCommunicator) -> list[int]:
        rank = everybody.rank
        two = device.communicator(rank % 2, 2, pair[rank // 2])
        one, other = np.ones(3, np.float32), np.ones(3, np.float32)
        for _ in range(10):
            spans = device.spans([one])
            everybody.allreduce(spans, spans, ReduceOp.MAX, 1.0, 1.0)
            spans = device.spans([other])
            event = two.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        await_(event)
        assert one.tolist() == [1.0] * 3 and other.tolist() == [1024.0] * 3
        return [call[1] for call in device.library.calls if call[0] == "allreduce"]

    assert run_ranks(4, run) == [[1, 2] * 10] * 4


def test_some_of_the_ranks_are_split_off_and_outlive_the_whole() -> None:
    def run(device: Device, everybody: NcclCommunicator) -> list[str]:
        assert everybody.can_split()
        spans = device.spans([np.ones(3, np.float32)])
        event = everybody.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        await_(event)
        assert everybody.can_split()
        pair = everybody.split([2, 0], time.monotonic() + SECONDS)
        assert (pair is None) == (everybody.rank == 1)
        if pair is not None:
            device.made.append(pair)
            assert (pair.rank, pair.size) == (0 if everybody.rank == 2 else 1, 2)
        spans = device.spans([np.ones(3, np.float32)])
        await_(everybody.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0))
        everybody.close()
        if pair is not None:
            gathered = np.zeros(2, np.int32)
            own = np.array([everybody.rank], np.int32)
            await_(pair.allgather(device.spans([own]), device.spans([gathered]), [[1, 1]]))
            assert gathered.tolist() == [2, 0]
        return device.library.names()

    for names in run_ranks(3, run):
        assert names.count("split") == names.count("init") == 1


def test_while_the_device_is_at_work_nothing_is_split() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        device.library.hold.clear()
        spans = device.spans([np.ones(3, np.float32)])
        event = communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        assert not communicator.can_split()
        device.library.hold.set()
        await_(event)
        assert communicator.can_split()

    run_ranks(2, run)


def test_a_split_in_progress_is_interrupted_by_an_abort_of_the_parent() -> None:
    waits = threading.Event()

    def run(device: Device, everybody: NcclCommunicator) -> None:
        if everybody.rank == 1:
            assert waits.wait(SECONDS)
            time.sleep(0.1)
            everybody.abort()
            return
        threading.Timer(0.3, everybody.abort).start()
        waits.set()
        with pytest.raises((Aborted, DeviceFailure)):
            everybody.split([0, 1], time.monotonic() + SECONDS)
        everybody.abort()

    run_ranks(2, run)


def test_an_abort_ends_the_part_that_a_split_has_made_meanwhile() -> None:
    """After the communicator that was split: NCCL writes into a part while that is aborted."""

    def run(device: Device, everybody: NcclCommunicator) -> list[int]:
        library = device.library
        library.writes.clear()

        def abort() -> None:
            deadline = time.monotonic() + SECONDS
            while len(library.comms) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            everybody.abort()
            library.writes.set()

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(Aborted):
            everybody.split([0, 1], time.monotonic() + SECONDS)
        thread.join()
        everybody.close()
        return [call[1] for call in library.calls if call[0] == "abort"]

    assert run_ranks(2, run) == [[1, 2]] * 2


def test_while_nccl_aborts_other_threads_are_told_at_once() -> None:
    """``ncclCommAbort`` takes long, so no lock is held while it runs."""

    def run(device: Device, communicator: NcclCommunicator) -> None:
        library, begun, goes_on = device.library, threading.Event(), threading.Event()
        real, told_before_the_end = library.ncclCommAbort, list[bool]()

        def abort(comm: int) -> int:
            begun.set()
            told_before_the_end.append(goes_on.wait(5))
            return real(comm)

        library.ncclCommAbort = abort  # type: ignore[method-assign]
        spans = device.spans([np.ones(3, np.float32)])
        communicator.abort()
        assert begun.wait(SECONDS)
        with pytest.raises(Aborted):
            communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        with pytest.raises(Aborted):
            communicator.split([0, 1], time.monotonic() + SECONDS)
        goes_on.set()
        communicator.close()
        assert told_before_the_end == [True]

    run_ranks(2, run)


def test_a_collective_has_begun_when_the_device_has_done_all_that_comes_before_it() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        runtime, gate = device.runtime, threading.Event()
        device.library.hold.clear()
        runtime.current.push(lambda: assert_true(gate.wait(SECONDS)))
        communicator.follow(runtime.record(runtime.current))
        spans = device.spans([np.ones(3, np.float32)])
        event = communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        time.sleep(0.1)
        assert not event.begun() and not event.query()
        gate.set()
        deadline = time.monotonic() + SECONDS
        while not event.begun():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not event.query()
        device.library.hold.set()
        await_(event)

    run_ranks(2, run)


def test_an_abort_while_a_collective_is_in_flight_returns_at_once_and_ends_it() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        library = device.library
        library.hold.clear()
        library.abort_takes = 0.2
        spans = device.spans([np.ones(3, np.float32)])
        event = communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        assert event.error() is None
        communicator.abort()
        communicator.abort()
        assert isinstance(event.error(), Aborted)
        with pytest.raises(Aborted):
            communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        communicator.close()
        assert library.names().count("abort") == 1 and "destroy" not in library.names()
        deadline = time.monotonic() + SECONDS
        while not event.query():  # what the device was at has ended
            assert time.monotonic() < deadline
            time.sleep(0.01)

    run_ranks(2, run)


def test_an_abort_interrupts_the_wait_for_nccl_to_connect() -> None:
    device = Device()
    made: list[CommHandle] = []
    real = CommHandle._settle

    def settle(self: CommHandle, *arguments: Any) -> None:
        made.append(self)
        real(self, *arguments)

    errors: list[BaseException] = []

    def run() -> None:
        try:
            device.communicator(0, 2, os.urandom(128))
        except BaseException as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommHandle, "_settle", settle)
        thread = threading.Thread(target=run)
        thread.start()
        while not made:
            time.sleep(0.001)
        made[0].abort()
        thread.join(SECONDS)
    assert [type(error) for error in errors] == [Aborted]
    assert device.end() == [] and "abort" in device.library.names()


def test_a_rank_that_never_comes_is_an_error_with_what_to_look_at() -> None:
    device = Device()
    with pytest.raises(DeviceFailure, match=r"did not finish within the time limit.*NCCL_SOCKET_IFNAME"):
        CommHandle.create(device.nccl, device.runtime, 0, 2, os.urandom(128), time.monotonic() + 0.05, SECONDS)
    assert device.end() == [] and "abort" in device.library.names()


def test_a_peer_that_is_gone_is_told_in_the_words_of_nccl() -> None:
    gone = threading.Event()

    def run(device: Device, communicator: NcclCommunicator) -> None:
        if communicator.rank == 1:
            communicator.abort()
            communicator.close()
            gone.set()
            return
        assert gone.wait(SECONDS)
        spans = device.spans([np.ones(3, np.float32)])
        event = communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        deadline = time.monotonic() + SECONDS
        while event.error() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "remote process exited" in str(event.error()) and not event.query()
        with pytest.raises(DeviceFailure, match="remote process exited"):
            while True:
                communicator.allreduce(spans, spans, ReduceOp.SUM, 1.0, 1.0)
        communicator.abort()
        communicator.close()

    run_ranks(2, run)


def test_an_end_in_good_order_gives_back_what_was_made() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> list[str]:
        spans = device.spans([np.ones(3, np.float32)])
        event = communicator.allreduce(spans, spans, ReduceOp.SUM, 0.25, 1.0)
        communicator.close()
        assert event.error() is None  # what was queued is carried out
        await_(event)
        communicator.abort()  # at any time, also now
        assert device.library.comms[1].factors == {}
        return device.library.names()[-2:]

    assert run_ranks(2, run) == [["finalize", "destroy"]] * 2


def test_host_memory_is_refused() -> None:
    def run(device: Device, communicator: NcclCommunicator) -> None:
        array = np.ones(2, np.float32)
        with pytest.raises(TypeError, match="host memory"):
            communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)

    run_ranks(1, run)


def test_a_communicator_that_is_destroyed_meanwhile_is_not_asked_for_errors() -> None:
    """Another thread closes it between the first look at its state and the question to NCCL."""

    class Lock:
        def __init__(self, real: Any, before: Callable[[], None]) -> None:
            self.real, self.before = real, before

        def acquire(self, blocking: bool = True) -> bool:
            self.before()
            return bool(self.real.acquire(blocking))

        def release(self) -> None:
            self.real.release()

    def run(device: Device, communicator: NcclCommunicator) -> None:
        handle: Any = communicator._handle
        real = handle._lock

        def close() -> None:
            handle._lock = real
            handle.close()

        handle._lock = Lock(real, close)
        handle.failure()
        assert "destroy" in device.library.names()

    run_ranks(1, run)
