"""How a worker ends: a rank leaves, an abort interrupts it, an engine or a worker fails."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from datetime import timedelta

import numpy as np
import pytest

from horovod._base.config import Config
from horovod.comm.base import Aborted, PeerFailure
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Vectors
from horovod.core.errors import HorovodInternalError
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker.executor import kept
from horovod.core.worker.worker import WorkerThread
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    LARGE,
    MEDIUM,
    SECONDS,
    Set,
    Watch,
    allreduce_request,
    await_decision,
    error_of,
    hold,
    in_thread,
    ones,
    wait,
)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_ends_the_set_for_all_and_is_named(process_set: Set, leaver: int) -> None:
    ranks = process_set.whole(3, ranks=[5, 6, 7])
    wait(*(rank.allreduce("done", ones()) for rank in ranks))
    pending = [(index, rank.allreduce("pending", ones())) for index, rank in enumerate(ranks) if index != leaver]
    ranks[leaver].worker.leave("it had enough")
    for rank in ranks:
        assert rank.worker.join(SOON)
        ((who, reason, _),) = rank.stopped
        assert who == 5 + leaver
        assert reason.startswith("it had enough")
    for index, handle in pending:
        text = error_of(handle)
        assert text.startswith("Horovod has been shut down. This was caused by rank")
        assert f"rank {5 + leaver}: it had enough while rank {5 + index} waited for 'pending'" in text
    assert [interrupted for rank in ranks for _, _, interrupted in rank.stopped] == [
        index != leaver for index in range(3)
    ]
    for rank in ranks:
        with pytest.raises(HorovodInternalError, match="shut down"):
            rank.allreduce("late", ones())
        assert rank.watch.reports == []


def test_all_leave_at_once(process_set: Set) -> None:
    ranks = process_set.whole(3)
    for rank in ranks:
        rank.worker.leave("done")
    for rank in ranks:
        assert rank.worker.join(SOON)
        assert [interrupted for _, _, interrupted in rank.stopped] == [False]


def test_decisions_before_a_rank_leaves_still_run(process_set: Set) -> None:
    ranks = process_set.whole(2, cycle_time=timedelta(seconds=SECONDS))
    arrays = [ones(1), ones(2)]
    await_both = await_decision(ranks[0], 2)
    handles = [rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)]
    await_both()
    ranks[1].worker.leave("done")
    wait(*handles)
    np.testing.assert_array_equal(arrays[0], 3)
    for rank in ranks:
        assert rank.worker.join(SOON)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_an_abort_wakes_a_worker_out_of_a_collective(process_set: Set, engine: str) -> None:
    first, second = process_set.whole(2, engine)
    inside = threading.Event()
    first.communicator.before = inside.set
    begun, go_on = hold(second)
    handles = [first.allreduce("x", ones()), second.allreduce("x", ones())]
    assert begun.wait(SECONDS)
    assert inside.wait(SECONDS)
    waiting = first.allreduce("y", ones())
    first.worker.abort(HorovodInternalError("rank 9 failed"))
    assert error_of(handles[0]) == error_of(waiting) == "rank 9 failed"
    assert first.worker.join(SOON)
    with pytest.raises(HorovodInternalError, match="rank 9 failed"):
        first.allreduce("z", ones())
    second.worker.interrupt()
    go_on.set()
    second.worker.abort(HorovodInternalError("rank 9 failed"))
    assert error_of(handles[1]) == "rank 9 failed"
    assert second.worker.join(SOON)
    assert second.watch.reports == []


def expect_error(handle: Handle, seen: list[str], inside: threading.Event) -> None:
    """Wait as a script does; note the error, and whether the collective was still inside the engine."""
    try:
        handle.wait()
    except HorovodInternalError as error:
        seen.append(f"{error}{' inside' if inside.is_set() else ''}")


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("length", [LARGE, MEDIUM])
def test_no_tensor_is_written_after_its_error_was_reported(process_set: Set, length: int) -> None:
    """However the error is learned: by waiting, by a callback, or from the next collective. The smaller array is
    reduced by the very thread that waits."""
    (rank,) = process_set.whole(1)
    begun, go_on, inside = threading.Event(), threading.Event(), threading.Event()

    def engine() -> None:
        inside.set()
        begun.set()
        assert go_on.wait(SECONDS)
        inside.clear()
        raise Aborted

    rank.communicator.before = engine
    handle = rank.allreduce("x", ones(1, length))
    seen: list[str] = []
    scripts = [in_thread(lambda: expect_error(handle, seen, inside))]
    assert begun.wait(SECONDS)
    handle.then(lambda: seen.append(f"called{' inside' if inside.is_set() else ''}"))
    scripts.append(in_thread(lambda: rank.worker.abort(HorovodInternalError("rank 9 failed"))))
    wait_until(lambda: rank.communicator.aborts, "the abort")

    def submit() -> None:
        with pytest.raises(HorovodInternalError, match="rank 9 failed"):
            rank.allreduce("y", ones())
        seen.append(f"refused{' inside' if inside.is_set() else ''}")

    scripts.append(in_thread(submit))
    threading.Event().wait(0.05)
    assert seen == []
    assert not handle.done()
    go_on.set()
    for script in scripts:
        script.join(SECONDS)
    assert sorted(seen) == ["called", "rank 9 failed", "refused"]


def test_the_error_says_that_tensors_may_still_be_written(process_set: Set) -> None:
    (rank,) = process_set.whole(1, timeout=timedelta(milliseconds=50))
    begun, go_on = hold(rank)
    handle = rank.allreduce("x", ones(1, LARGE))
    assert begun.wait(SECONDS)
    rank.worker.abort(HorovodInternalError("rank 9 failed."))
    text = error_of(handle)
    go_on.set()
    assert text.startswith("rank 9 failed. A thread of this rank (horovod-worker) did not leave a collective in time")
    assert "end this process" in text
    with pytest.raises(HorovodInternalError, match="end this process"):
        rank.allreduce("y", ones())


def test_an_abort_wakes_a_worker_that_sleeps(process_set: Set) -> None:
    first, second = process_set.whole(2)
    handle = first.allreduce("x", ones())
    for rank in (first, second):
        rank.worker.abort(HorovodInternalError("over"))
        assert rank.worker.join(SOON)
    assert error_of(handle) == "over"
    first.worker.abort(HorovodInternalError("again"))
    with pytest.raises(HorovodInternalError, match="over"):
        first.allreduce("y", ones())


def test_a_peer_that_fails_in_a_collective_is_reported_by_its_global_rank(process_set: Set) -> None:
    rank, _ = process_set.part(0, 1)
    rank.worker.ranks = [17]

    def fail() -> None:
        raise PeerFailure(0, "it went silent", suspected=True)

    rank.communicator.before = fail
    handle = rank.allreduce("x", ones())
    wait_until(lambda: rank.watch.reports, "the report")
    assert rank.watch.reports == [(17, "it went silent", True)]
    assert not handle.done()  # that is for the failure
    rank.worker.abort(HorovodInternalError("the failure"))
    assert error_of(handle) == "the failure"


def test_an_abort_between_two_batches_is_no_failure_of_this_worker(
    process_set: Set, caplog: pytest.LogCaptureFixture
) -> None:
    rank, _ = process_set.part(0, 1, start=False, fusion_threshold=0)
    aborts: list[threading.Thread] = []

    def abort() -> None:
        aborts.append(in_thread(lambda: rank.worker.abort(HorovodInternalError("the failure"))))
        wait_until(lambda: rank.communicator.aborts, "the abort")

    rank.communicator.before = abort
    handles = [rank.allreduce("a", ones()), rank.allreduce("b", ones())]
    rank.worker.start()
    assert error_of(handles[1]) == "the failure"
    assert rank.worker.join(SOON)
    assert rank.watch.reports == []
    aborts[0].join(SECONDS)
    assert rank.communicator.batches == [1]
    assert caplog.text == ""


def test_an_aborted_engine_reports_no_failed_rank(process_set: Set) -> None:
    rank, _ = process_set.part(0, 1)

    def aborted() -> None:
        raise Aborted

    rank.communicator.before = aborted
    handle = rank.allreduce("x", ones())
    rank.worker.abort(HorovodInternalError("the failure"))
    assert rank.worker.join(SOON)
    assert error_of(handle) == "the failure"
    assert rank.watch.reports == []


@pytest.mark.parametrize("failure", [PeerFailure(0, "it went silent"), Aborted(), ZeroDivisionError("oh")])
def test_requests_fail_if_no_failure_is_decided_in_time(process_set: Set, failure: Exception) -> None:
    rank, _ = process_set.part(0, 1, timeout=timedelta(milliseconds=50))

    def fail() -> None:
        raise failure

    rank.communicator.before = fail
    handles = [rank.allreduce("x", ones()), rank.allreduce("y", ones())]
    assert rank.worker.join(SOON)
    for handle in handles:
        assert error_of(handle).endswith("Rank 0 did not report in time which rank failed first.")


def test_a_completion_that_raises_keeps_no_other_waiting(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 2, start=False)

    def broken() -> None:
        raise ZeroDivisionError("oh")

    handles = [rank.allreduce("x", ones()), rank.allreduce("y", ones())]
    handles[0].then(broken)
    rank.worker.abort(HorovodInternalError("the failure"))
    assert error_of(handles[1]) == "the failure"
    assert "a callback at the end of a collective failed" in caplog.text


def test_a_bug_in_a_worker_is_that_ranks_failure(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 1)

    def broken() -> None:
        raise ZeroDivisionError("oh")

    rank.communicator.before = broken
    rank.allreduce("x", ones())
    wait_until(lambda: rank.watch.reports, "the report")
    rank.worker.abort(HorovodInternalError("the failure"))
    assert rank.worker.join(SOON)
    assert rank.watch.reports == [(0, "its worker thread failed: ZeroDivisionError('oh')", False)]
    assert "the worker thread of process set [0] failed" in caplog.text


def test_an_overflow_in_a_gradient_is_no_warning(process_set: Set, recwarn: pytest.WarningsRecorder) -> None:
    ranks = process_set.whole(2)
    arrays = [ones(3e38), ones(3e38)]
    wait(*(rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)))
    assert np.isinf(arrays[0]).all()
    assert not recwarn.list


def test_a_worker_that_was_closed_writes_to_no_file_of_the_script(process_set: Set) -> None:
    """A thread of the script may still hold a handle, and ask for more haste."""
    rank, _ = process_set.part(0, 1)
    handle = Handle()
    rank.worker.leave("done")
    assert rank.worker.join(SOON)
    process_set.close()
    pipes = [os.pipe() for _ in range(8)]  # among them the numbers that were the worker thread's
    try:
        rank.worker.drive(handle)
        rank.worker.take_over(handle)
        rank.worker.leave("again")
        for reader, _ in pipes:
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
    finally:
        for each in pipes:
            os.close(each[0])
            os.close(each[1])


class Stuck(SingleCommunicator):
    """Waits in every allreduce until it is aborted."""

    def __init__(self, lingers: str) -> None:
        super().__init__()
        self.lingers = lingers
        self.inside, self.aborted = threading.Event(), threading.Event()

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        self.inside.set()
        assert self.aborted.wait(SECONDS)
        raise Aborted

    def abort(self) -> None:
        self.aborted.set()

    def may_still_read(self) -> bool:
        return self.lingers == "reads"

    def may_still_write(self) -> bool:
        return self.lingers == "writes"


class Memory:
    """What owns tensors; a weak reference tells whether it is kept."""


@pytest.mark.parametrize("lingers", ["", "reads", "writes"])
def test_after_a_failure_memory_is_kept_where_the_engine_may_still_use_it(lingers: str) -> None:
    engine = Stuck(lingers)
    worker = WorkerThread("0", [0], 0, {}, engine, Config(), Watch(), lambda *_: None)
    worker.start()
    array, memory = np.ones(1 << 20, np.float32), Memory()
    known = weakref.ref(memory)
    entry = Entry(allreduce_request("a", array.shape), [array], [array], None, Handle(), 0.0, memory)
    worker.submit(entry)
    assert engine.inside.wait(SECONDS)
    worker.abort(HorovodInternalError("the end"))
    assert worker.join(SECONDS)
    said = "has not ended an operation in time, so the tensors" in str(entry.handle.error)
    assert said == (lingers == "writes")
    worker.close()
    del entry, memory
    gc.collect()
    assert (known() is not None) == bool(lingers)
    kept.clear()
