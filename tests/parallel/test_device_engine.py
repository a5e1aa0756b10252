"""Collectives on device memory from the core to the C functions, between real processes, on C libraries that stand in for NCCL
and CUDA: communicators, events, the watch over the device, aborts, parts. Nothing but the paths of the libraries is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import native_devices
from horovod.comm.engine import EngineError
from horovod.comm.nccl import handle as handle
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Spans, address_of, layout_of
from horovod.common import basics as hvd
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import global_process_set as hvd_global
from horovod.core.requests import devices
from horovod.core.submission import collectives
from jobs import Job, make_job
from native_devices import BLOCKING, IN_PROGRESS, INIT, KERNEL, LAUNCH, SPLIT, Arrays, StandIn
from ranks import RankPool
from time_limits import SOON

ENV = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
MODES = pytest.mark.parametrize("mode", [BLOCKING, IN_PROGRESS], ids=["blocking", "in progress"])


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    return make_job(lambda size: ranks(size, ENV), "horovod.common.basics")


@contextlib.contextmanager
def generation(path: str, sets: list[list[int]], gpus: str) -> Iterator[tuple[Any, ...]]:
    """On a rank: a generation in which NCCL moves device memory. No rule was broken, and nothing is left."""
    hvd.shutdown()
    before = devices.provider()
    with native_devices.loaded(path, gpus) as library:
        arrays = Arrays()
        devices.provide(arrays.devices)
        try:
            made = [hvd.ProcessSet(ranks) for ranks in sets]
            hvd.init(process_sets=made)
            arrays.begin()
            yield library, arrays, *made
            hvd.shutdown()
        finally:
            library.hold(False)
            library.fail(0)
            devices.provide(before)
        assert library.breaches() == []
        assert library.operations() == 0


def on(job: Job, size: int, path: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """``function(library, arrays, *sets, *args)`` on every rank."""
    sets = keywords.pop("sets", [])
    gpus = keywords.pop("gpus", "GPU-0,GPU-1")

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with generation(path, sets, gpus) as found:
            return function(*found, *args)

    return job(size, run, *args, **keywords)


def hvd_barrier() -> None:
    collectives.barrier().wait()


def await_devices() -> None:
    """Wait until the worker thread has seen that the device has done everything."""
    open_events = running().workers[0].executor._open_events
    deadline = time.monotonic() + SOON
    while open_events:
        first = open_events._open[0]
        assert time.monotonic() < deadline, (len(open_events), first.names, first.event.begun(), first.event.query())
        threading.Event().wait(0.005)


def filled(length: int, dtype: Any = np.float32, factor: int = 1) -> Any:
    return (np.arange(length) % 7 * factor + hvd.rank() + 1).astype(dtype)


@MODES
def test_sums_of_many_sizes_and_types(job: Job, stand_in: str, mode: int) -> None:
    def check(library: StandIn, arrays: Arrays) -> None:
        library.behave(mode)
        for dtype in (np.uint8, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            lengths = [1, 0, 17, 300_000, 5]
            mine = [filled(length, dtype) for length in lengths]
            arrays.allreduce(mine, np.dtype(dtype).name)
            for length, found in zip(lengths, mine, strict=True):
                assert np.array_equal(found, (np.arange(length) % 7 * 3 + 6).astype(dtype)), dtype

    on(job, 3, stand_in, check)


@MODES
def test_averages_and_factors(job: Job, stand_in: str, mode: int) -> None:
    """Factors that NCCL can multiply with; the binding asks for no others, as this device multiplies nothing."""

    def check(library: StandIn, arrays: Arrays) -> None:
        library.behave(mode)
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            for prescale, postscale in ((1.0, 0.5), (0.25, 1.0), (4.0, 0.25), (0.5, 3.0)):
                mine = filled(50, dtype)
                arrays.allreduce(
                    [mine], f"{np.dtype(dtype).name} {prescale} {postscale}", ReduceOp.SUM, prescale, postscale
                )
                wanted = (np.arange(50) % 7 * 2 + 3) * prescale * postscale
                assert np.array_equal(mine.astype(np.float64), wanted), (dtype, prescale, postscale)

    on(job, 2, stand_in, check)


def test_sums_with_many_factors_do_not_add_up_in_nccl(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays) -> int:
        for turn in range(handle.SUMS + 10):
            mine = filled(5)
            arrays.allreduce([mine], "x", ReduceOp.SUM, 1.0, turn + 0.5)
            assert np.array_equal(mine, (np.arange(5) * 2 + 3) * (turn + 0.5))
        return library.operations()

    assert on(job, 2, stand_in, check) == [handle.SUMS] * 2


@MODES
def test_every_kind_of_collective(job: Job, stand_in: str, mode: int) -> None:
    def check(library: StandIn, arrays: Arrays) -> None:
        library.behave(mode)
        rank = hvd.rank()
        for length in (3, 40_000):  # the second travels in pieces
            root = filled(length)
            arrays.broadcast(root, 1, "root")
            assert np.array_equal(root, np.arange(length) % 7 + 2)
            rows = arrays.allgather(filled(length + rank), "rows")
            assert np.array_equal(rows, np.concatenate([np.arange(length + each) % 7 + each + 1 for each in range(3)]))
            splits = [length, 0, rank]
            sent = arrays.alltoall(filled(length + rank), splits, "splits")
            assert np.array_equal(sent, wanted_of_alltoall(length, rank))
            part = arrays.reducescatter(filled(length * 3 + 1), "part")
            whole = np.arange(length * 3 + 1) % 7 * 3 + 6
            start = rank * length + min(rank, 1)
            assert np.array_equal(part, whole[start : start + length + (rank == 0)])

    def wanted_of_alltoall(length: int, rank: int) -> Any:
        parts = []
        for peer in range(3):
            splits = [length, 0, peer]
            start = sum(splits[:rank])
            parts.append((np.arange(length + peer) % 7 + peer + 1)[start : start + splits[rank]])
        return np.concatenate(parts)

    on(job, 3, stand_in, check)


def test_earlier_work_of_the_stream_comes_first_without_blocking_the_host(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays) -> None:
        library.behave(late=0.01)
        mine = np.zeros(1000, np.float32)
        source = np.full(1000, hvd.rank() + 1, np.float32)
        layout = layout_of(mine.dtype, (1000,), arrays.runtime.device)
        for turn in range(10):
            arrays.runtime.copy(arrays.stream, Spans(layout, [address_of(source)]), Spans(layout, [address_of(mine)]))
            pending = arrays.allreduce_async([mine], f"x{turn}")
            pending.wait()
            with arrays.runtime.on(arrays.stream.address):
                assert pending.event is not None
                pending.event.wait()  # the stream waits, the host does not
        arrays.finish()
        assert mine.tolist() == [3.0] * 1000

    on(job, 2, stand_in, check)


def test_process_sets_are_split_off_and_overlap(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays, *sets: Any) -> None:
        mine = [each for each in (*sets, hvd_global) if each.included()]
        arrays.allreduce([filled(3)], "first")
        hvd_barrier()
        for turn in range(5):
            order = mine[hvd.rank() % len(mine) :] + mine[: hvd.rank() % len(mine)]
            found = {each.process_set_id: filled(100, factor=turn) for each in mine}
            pending = [
                arrays.allreduce_async([found[each.process_set_id]], "x", process_set=each.process_set_id)
                for each in order
            ]
            for each in pending:
                arrays.finish(each)
            for each in mine:
                wanted = len(each.ranks) * turn * (np.arange(100) % 7) + sum(rank + 1 for rank in each.ranks)
                assert np.array_equal(found[each.process_set_id], wanted)

    on(job, 3, stand_in, check, sets=[[0, 1], [1, 2], [0, 2]])


@pytest.mark.parametrize("what", [INIT, SPLIT], ids=["init", "split"])
@MODES
def test_a_communicator_that_cannot_be_made_is_an_error_on_all_ranks(
    job: Job, stand_in: str, mode: int, what: int
) -> None:
    """One rank's fails behind its back, and the other does not wait for it until the limit."""

    def check(library: StandIn, arrays: Arrays, pair: Any) -> str:
        library.behave(mode)
        chosen = 0
        if what == SPLIT:
            arrays.allreduce([filled(3)], "first")
            await_devices()
            hvd_barrier()
            chosen = pair.process_set_id
        if hvd.rank() == 1:
            library.fail(what)
        found = ""
        for name in ("a", "b")[: 1 if chosen else 2] if not chosen or pair.included() else ():
            with pytest.raises(HorovodInternalError) as error:
                arrays.allreduce([filled(3)], name, process_set=chosen)
            found = str(error.value)
        with contextlib.suppress(HorovodInternalError):  # what a split has broken cannot be used any more
            hvd_barrier()
        return found

    one, other, _ = on(job, 3, stand_in, check, sets=[[0, 1]])
    assert one == other and "nccl could not be set up for the memory of GPUs: rank 1: " in one
    assert "remote process exited" in one and "HOROVOD_GPU_OPERATIONS=HOST" in one


@pytest.mark.parametrize("what", [LAUNCH, KERNEL], ids=["launch", "kernel"])
@MODES
def test_a_collective_that_fails_later_ends_the_job_with_its_name(
    job: Job, stand_in: str, mode: int, what: int
) -> None:
    def check(library: StandIn, arrays: Arrays) -> str:
        library.behave(mode)
        arrays.allreduce([filled(3)], "first")
        if hvd.rank() == 1:
            library.fail(what, after=2)
        with pytest.raises(HorovodInternalError) as error:
            for turn in range(1000):
                arrays.allreduce_async([filled(3)], f"x{turn}").wait()
                threading.Event().wait(0.01)
        return str(error.value)

    for text in on(job, 2, stand_in, check):
        assert "rank 1" in text and "remote process exited" in text, text


def test_a_rank_that_dies_ends_what_the_others_have_queued(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays) -> str:
        arrays.allreduce([filled(3)], "first")
        if hvd.rank() == 1:
            os._exit(7)
        mine = [filled(3) for _ in range(1000)]
        with pytest.raises(HorovodInternalError) as error:
            for turn, each in enumerate(mine):
                arrays.allreduce_async([each], f"x{turn}").wait()
                threading.Event().wait(0.01)
        arrays.finish()  # the abort has the device go on
        return str(error.value)

    found = on(job, 3, stand_in, check, dies=[1])
    assert all("Rank 1" in text or "rank 1" in text for text in (found[0], found[2])), found


def test_a_gpu_that_does_not_come_to_a_collective_ends_the_job_after_its_own_limit(job: Job, stand_in: str) -> None:
    """Its process answers all the time, and the limit of host memory is longer."""

    def check(library: StandIn, arrays: Arrays) -> str:
        arrays.allreduce([filled(3)], "first")
        hvd_barrier()
        if hvd.rank() == 1:
            library.hold(True)
        with pytest.raises(HorovodInternalError) as error:
            arrays.allreduce_async([filled(3)], "late").wait()
            for _ in range(1000):
                hvd_barrier()
                threading.Event().wait(0.02)
        return str(error.value)

    env = {"HOROVOD_NCCL_TIMEOUT_SECONDS": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    for text in on(job, 2, stand_in, check, env=env):
        assert "late has not completed on the device" in text and "HOROVOD_NCCL_TIMEOUT_SECONDS" in text, text


def test_a_gpu_may_be_late_for_longer_than_host_memory_may(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays) -> None:
        arrays.allreduce([filled(3)], "first")
        hvd_barrier()
        if hvd.rank() == 1:
            library.hold(True)
        mine = filled(3)
        pending = arrays.allreduce_async([mine], "late")
        pending.wait()
        threading.Event().wait(3)
        library.hold(False)
        arrays.finish(pending)
        assert mine.tolist() == [3.0, 5.0, 7.0]

    on(job, 2, stand_in, check, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})


def test_nccl_may_take_longer_to_connect_than_host_memory_may(job: Job, stand_in: str) -> None:
    """Ranks that wait for the communicator of another one do not take it for stuck; those that are no members neither."""

    def check(library: StandIn, arrays: Arrays, pair: Any) -> None:
        if hvd.rank() == 0:
            library.slow(3.0)
        if pair.included():
            mine = filled(3)
            arrays.allreduce([mine], "x", process_set=pair.process_set_id)
            assert mine.tolist() == [3.0, 5.0, 7.0]
        hvd_barrier()

    on(job, 3, stand_in, check, sets=[[0, 1]], env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})


def test_a_communicator_that_is_not_made_in_time_leaves_nccl_its_memory(job: Job, stand_in: str) -> None:
    """NCCL notes where a communicator is when it is made, which may be after the limit."""

    def check(library: StandIn, arrays: Arrays) -> str:
        library.slow(3.0)
        with pytest.raises(HorovodInternalError, match="did not finish within the time limit") as error:
            arrays.allreduce([filled(3)], "x")
        assert not handle._written_by_nccl  # the abort has ended it
        return str(error.value)

    for text in on(job, 2, stand_in, check, env={"HOROVOD_NCCL_START_TIMEOUT": "1"}):
        assert "could not be set up" in text


@pytest.mark.parametrize(
    ("gpus", "chosen", "engine"),
    [
        (["GPU-a,-GPU-b", "-GPU-a,GPU-b"], ["0", "0"], "nccl"),
        (["GPU-a,GPU-b"] * 2, ["MIG-a-1", "MIG-b-1"], "nccl"),
        (["GPU-a,GPU-b"] * 2, ["MIG-b-1", "MIG-b-2"], ""),
    ],
    ids=["control groups", "slices of two GPUs", "slices of one GPU"],
)
def test_ranks_share_a_gpu_if_it_is_the_same_whatever_its_number(
    job: Job, stand_in: str, gpus: list[str], chosen: list[str], engine: str
) -> None:
    """A batch system shows each rank one GPU, or one slice of a GPU, as number 0."""

    def check() -> tuple[str, str]:
        hvd.shutdown()
        rank, found = int(os.environ["HOROVOD_RANK"]), list[str]()
        os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
        before = devices.provider()
        with native_devices.loaded(stand_in, gpus[rank]):
            arrays = Arrays()
            devices.provide(arrays.devices)
            os.environ["CUDA_VISIBLE_DEVICES"] = chosen[rank]
            try:
                for forced in ("", "nccl"):
                    os.environ["HOROVOD_GPU_OPERATIONS"] = forced
                    try:
                        hvd.init()
                        found.append(running().device_engine)
                        hvd.shutdown()
                    except EngineError as error:
                        found.append(str(error))
            finally:
                devices.provide(before)
                del os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HOROVOD_GPU_OPERATIONS"]
                os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        return found[0], found[1]

    for found, forced in job(2, check):
        assert found == engine
        told = "share 1 GPU, and NCCL needs one GPU for each rank, and counts MIG slices of one GPU as the same GPU"
        assert forced == engine if engine else told in forced


def test_captures_of_graphs_on_other_threads_stay_valid(job: Job, stand_in: str) -> None:
    def check(library: StandIn, arrays: Arrays) -> bool:
        library.behave(late=0.005)
        arrays.allreduce([filled(3)], "first")
        mine = [filled(1000) for _ in range(20)]
        pending = [arrays.allreduce_async([each], f"x{turn}") for turn, each in enumerate(mine)]
        library.capture(True)
        await_devices()
        valid = library.capture(False)
        hvd_barrier()  # a rank that leaves ends the look at what the others have open
        for each in pending:
            arrays.finish(each)
        return valid

    assert on(job, 2, stand_in, check) == [True, True]
