"""Threads of the script that wait for a quick collective, and drive the worker meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import numpy as np
import pytest

from horovod.comm.base import PeerFailure
from horovod.comm.datatypes import Array, DataType
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Operation,
    Request,
    Stop,
    TensorSpec,
)
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    JOIN,
    LARGE,
    MEDIUM,
    SECONDS,
    Rank,
    Set,
    abort_when_reported,
    error_of,
    on_every_rank,
    ones,
    threads_of,
    wait,
)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_collectives_run_on_the_thread_that_waits(process_set: Set, size: int) -> None:
    ranks = process_set.whole(size)
    names = [threads_of(rank) for rank in ranks]

    def script(rank: Rank) -> None:
        for turn in range(300):
            array = ones(rank.worker.index + turn)
            rank.allreduce("x", array).wait()
            np.testing.assert_array_equal(array, sum(range(turn, turn + size)))

    on_every_rank(ranks, script)
    for rank, some in zip(ranks, names, strict=True):
        assert len(some) == 300
        assert f"script-{rank.worker.index}" in some  # the worker thread may be first at times
    assert [rank.watch.reports for rank in ranks] == [[]] * size


@pytest.mark.usefixtures("cores")
def test_large_ones_and_joins_are_left_to_the_workers_thread(process_set: Set) -> None:
    ranks = process_set.whole(2)
    names = [threads_of(rank) for rank in ranks]

    def script(rank: Rank) -> None:
        for turn in range(30):
            small, large = ones(), ones(length=LARGE)
            first, second = rank.allreduce("large", large), rank.allreduce("small", small)
            second.wait()
            names[rank.worker.index].append("large?" if not first.done() else "both")
            first.wait()
            assert small[0] == large[-1] == 2
            names[rank.worker.index].clear()
            rank.allreduce("large", ones(length=LARGE)).wait()
            assert set(names[rank.worker.index]) == {f"horovod-worker-test-{rank.worker.index}"}, turn
            names[rank.worker.index].clear()
        rank.submit(JOIN).wait()

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("how", ["a callback", "a look", "a wait that may end"])
def test_requests_without_a_waiting_thread_are_carried_out_by_the_worker_thread(
    process_set: Set, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Though it leaves small collectives to those that wait, for ever if need be."""
    monkeypatch.setattr("horovod.core.worker.worker.STANDBY_MILLISECONDS", 1e6)
    ranks = process_set.whole(2)

    def script(rank: Rank) -> None:
        for _ in range(20):
            rank.allreduce("waited", ones()).wait()
            handle = rank.allreduce("not waited for", ones())
            if how == "a callback":
                called = threading.Event()
                handle.then(called.set)
                assert called.wait(SECONDS)
            elif how == "a look":
                handle.leave_to_worker()
                wait_until(handle.done, "a collective that somebody asks for")
            else:
                handle.wait(SECONDS)
            assert handle.error is None

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("cores")
def test_collectives_without_a_waiting_thread_complete_after_small_ones(process_set: Set) -> None:
    ranks = process_set.whole(2)

    def script(rank: Rank) -> None:
        for _ in range(20):
            rank.allreduce("waited", ones()).wait()
            alone = rank.allreduce("alone", ones())
            wait_until(alone.done, "a collective that nobody waits for")
            assert alone.error is None

    on_every_rank(ranks, script)


def test_a_waiting_thread_sees_an_orderly_end_without_a_reported_loss(
    process_set: Set,
) -> None:
    """It is the worker thread that ends the worker thread; by then the coordinator has closed the connection."""
    rank, peers = process_set.part(1, 2, start=False)
    handle = rank.allreduce("x", ones())
    peers[0].say(Stop(0, "it is done"))
    peers[0].channel.close()
    rank.worker.drive(handle)
    assert not handle.done()
    rank.worker.start()
    assert "caused by rank 0: it is done while rank 1 waited for 'x'" in error_of(handle)
    assert rank.worker.join(SECONDS)
    assert rank.stopped == [(0, "it is done while rank 1 waited for 'x'", True)] and rank.watch.reports == []


@pytest.mark.usefixtures("cores")
def test_a_large_one_after_small_ones_is_served_at_once(process_set: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the worker thread leaves the connections to those that wait, for ever if need be."""
    monkeypatch.setattr("horovod.core.worker.worker.STANDBY_MILLISECONDS", 1e6)
    ranks = process_set.whole(2)

    def script(rank: Rank) -> None:
        for _ in range(10):
            rank.allreduce("small", ones()).wait()
            large = rank.allreduce("large", ones(length=LARGE))
            wait_until(large.done, "a large one")
            assert large.error is None

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("length", [4, MEDIUM])
def test_a_waiting_thread_carries_out_every_quick_collective(process_set: Set, length: int) -> None:
    ranks = process_set.whole(2)
    names = [threads_of(rank) for rank in ranks]
    vector = (TensorSpec("x", DataType.FLOAT32, (length,)),)
    halves = (length // 2, length // 2)
    requests = [
        Request(Operation.ALLREDUCE, "x", vector),
        Request(Operation.BROADCAST, "x", vector, root=0),
        Request(Operation.REDUCESCATTER, "x", vector),
        Request(Operation.ALLGATHER, "x", vector),
        Request(Operation.ALLTOALL, "x", vector, splits=halves),
        Request(Operation.BARRIER, "x", transient=True),
    ]

    def script(rank: Rank) -> None:
        for request in requests:
            output = [np.empty(length // 2, np.float32)] if request.operation == Operation.REDUCESCATTER else None
            for _ in range(20):
                rank.submit(request, ones(length=length), outputs=output, allocate=filled).wait()

    def filled(_: int, rows: int) -> Array:
        return np.empty(rows, np.float32)

    on_every_rank(ranks, script)
    for rank, some in zip(ranks, names, strict=True):
        assert (
            some.count(f"script-{rank.worker.index}") > len(some) / 2
        )  # a peer that is late leaves it to the worker threads


@pytest.mark.usefixtures("cores")
def test_many_threads_wait_on_every_rank(process_set: Set) -> None:
    ranks = process_set.whole(2)

    def script(rank: Rank) -> None:
        def one(number: int) -> None:
            for turn in range(100):
                length = 10 if (turn + number) % 3 else MEDIUM
                array = ones(number, length)
                rank.allreduce(f"x{number}", array).wait()
                assert array[0] == array[-1] == 2 * number

        threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("cores")
def test_an_interrupted_wait_leaves_the_collective_to_the_worker_thread(process_set: Set) -> None:
    """The thread that waits returns to where signals are heard after some milliseconds; the worker thread does the rest."""
    first, second = process_set.whole(2)
    names = threads_of(first)
    handle = first.allreduce("x", ones())
    first.worker.drive(handle)
    assert not handle.done()
    wait(second.allreduce("x", ones()), handle)
    assert names == ["horovod-worker-test-0"]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (PeerFailure(1, "it went silent"), (1, "it went silent")),
        (ZeroDivisionError("oh"), (0, "its worker thread failed: ZeroDivisionError('oh')")),
    ],
)
def test_a_failure_on_a_waiting_thread_is_the_workers(
    process_set: Set, failure: Exception, told: tuple[int, str]
) -> None:
    first, second = process_set.whole(2)
    broken = threading.Event()

    def fail() -> None:
        if threading.current_thread().name == "script-0":
            broken.set()
            raise failure

    first.communicator.before = fail

    def script(rank: Rank) -> None:
        try:
            while True:
                rank.allreduce("x", ones()).wait()
        except HorovodInternalError as error:
            assert str(error) == "rank 1 failed"

    aborter = abort_when_reported([first, second], "rank 1 failed")
    on_every_rank([first, second], script)
    aborter.join(SECONDS)
    assert broken.is_set()
    assert first.watch.reports[0][:2] == told
    assert first.worker.join(SOON)


@pytest.mark.usefixtures("cores")
def test_an_exception_raised_in_a_driving_thread_fails_the_worker(process_set: Set) -> None:
    """Not a signal: those wait. What is half done cannot be taken back."""
    (rank,) = process_set.whole(1)

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(3)

    rank.communicator.before = interrupt
    with pytest.raises(SystemExit):
        while True:
            rank.allreduce("x", ones()).wait()
    wait_until(lambda: bool(rank.watch.reports), "the report")
    assert "interrupted a thread that was inside a collective" in rank.watch.reports[0][1]


@pytest.mark.usefixtures("cores")
def test_stalls_are_reported_while_another_thread_takes_all_progress(
    process_set: Set, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = process_set.whole(2, stall_warning_time=timedelta(seconds=0.3))
    first.allreduce("alone", ones())
    until = time.monotonic() + SECONDS

    def reported() -> bool:
        return any("alone" in record.getMessage() for record in caplog.records)

    def script(rank: Rank) -> None:
        more = ones()
        while more[0]:
            more[0] = rank is first and not reported() and time.monotonic() < until
            rank.allreduce("more", more).wait()

    with caplog.at_level(logging.WARNING, "horovod"):
        on_every_rank([first, second], script)
    assert reported()


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("length", [4, MEDIUM, LARGE])
def test_after_a_failed_step_no_thread_takes_another_step(process_set: Set, length: int) -> None:
    """On whichever thread it failed: an engine that gave up in the middle would give wrong results."""
    (rank,) = process_set.whole(1)

    def fail() -> None:
        raise ZeroDivisionError

    rank.communicator.before = fail
    first = rank.allreduce("first", ones(length=length))
    rank.worker.drive(first)
    wait_until(lambda: bool(rank.watch.reports), "the report")
    names = threads_of(rank)
    second = rank.allreduce("second", ones())
    rank.worker.drive(second)
    assert not first.done() and not second.done() and names == []
    rank.worker.abort(HorovodInternalError("the failure"))
    assert error_of(first) == error_of(second) == "the failure"
