"""Worker threads of one process set inside this process: real threads, real messages over socket pairs, a real engine."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod.comm.base import Aborted, PeerFailure
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Vectors
from horovod.control.channel import frame
from horovod.core.config import Config
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Definition,
    Leave,
    Operation,
    Order,
    Request,
    Stop,
    TensorSpec,
    encode,
)
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker import in_flight as requests_module
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.cpu_affinity import CpuPlacement
from horovod.core.worker.executor import kept
from horovod.core.worker.worker import WorkerThread
from horovod.observe.timeline import Timeline
from unit.control.together import wait_until
from unit.core.workers import (
    JOIN,
    LARGE,
    MEDIUM,
    SECONDS,
    Rank,
    Set,
    Watch,
    abort_when_reported,
    allreduce_request,
    error_of,
    on_every_rank,
    ones,
    threads_of,
    wait,
)

# Requests whose inputs are still to come


def held(rank: Rank, name: str, array: Array) -> Entry:
    entry = Entry(allreduce_request(name, array.shape), [array], [array], None, Handle(), time.monotonic())
    rank.worker.submit(entry, held=True)
    return entry


def test_a_held_request_is_announced_when_it_is_released_and_holds_up_no_other(process_set: Set) -> None:
    first, second = process_set.whole(2)
    arrays = [np.full(4, np.nan, np.float32) for _ in range(2)]
    entries = [held(rank, "late", array) for rank, array in zip((first, second), arrays, strict=True)]
    wait(*[rank.allreduce("now", ones()) for rank in (first, second)])
    assert not any(entry.handle.done() for entry in entries)
    with pytest.raises(ValueError, match="same name"):
        first.allreduce("late", ones())
    for rank, array, entry in zip((second, first), reversed(arrays), reversed(entries), strict=True):
        array[:] = 1
        rank.worker.release(entry)
    wait(*[entry.handle for entry in entries])
    assert [array.tolist() for array in arrays] == [[2.0] * 4] * 2


def test_a_held_request_fails_with_the_job_and_its_release_comes_to_nothing(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    rank.worker.abort(HorovodInternalError("rank 3 failed"))
    assert error_of(entry.handle) == "rank 3 failed"
    rank.worker.release(entry)
    assert rank.worker._requests._unannounced == []


def test_a_held_request_whose_inputs_never_come_fails_on_this_rank(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    rank.worker.release(entry, HorovodInternalError("the device is gone"))
    assert error_of(entry.handle) == "the device is gone"
    wait(rank.allreduce("late", ones()))


def test_a_name_that_was_withdrawn_is_free(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    rank.worker.withdraw(entry)
    rank.worker.release(entry)
    wait(rank.allreduce("late", ones()))
    assert not entry.handle.done()


# Collectives


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_sum(process_set: Set, engine: str, size: int) -> None:
    ranks = process_set.whole(size, engine)
    for turn in range(5):
        arrays = [ones(rank + turn) for rank in range(size)]
        wait(*(rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)))
        for array in arrays:
            np.testing.assert_array_equal(array, sum(range(turn, turn + size)))
    assert [rank.watch.reports for rank in ranks] == [[]] * size


def test_a_set_of_one(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    array = ones(3)
    wait(rank.allreduce("x", array, ReduceOp.AVERAGE, postscale=2.0))
    np.testing.assert_array_equal(array, 6)


def test_many_names_in_a_different_order_on_each_rank(process_set: Set) -> None:
    ranks = process_set.whole(3)
    names = [f"n{number}" for number in range(60)]
    for turn in range(3):
        arrays = [{name: ones(turn + int(name[1:])) for name in names} for _ in ranks]
        handles = []
        for index, rank in enumerate(ranks):
            shuffled = names[index * 20 :] + names[: index * 20]
            handles += [rank.allreduce(name, arrays[index][name]) for name in shuffled]
        wait(*handles)
        for index in range(3):
            for name in names:
                np.testing.assert_array_equal(arrays[index][name], 3 * (turn + int(name[1:])))


@pytest.mark.parametrize("capacity", [0, 1, 1000])
def test_the_size_of_the_dictionaries_changes_nothing(process_set: Set, capacity: int) -> None:
    ranks = process_set.whole(2, cache_capacity=capacity)
    for turn in range(20):
        arrays = [ones(turn), ones(1)]
        name = f"n{turn % 5}"
        wait(*(rank.allreduce(name, array) for rank, array in zip(ranks, arrays, strict=True)))
        np.testing.assert_array_equal(arrays[0], turn + 1)
        np.testing.assert_array_equal(arrays[1], turn + 1)


def test_a_name_whose_shape_changes(process_set: Set) -> None:
    ranks = process_set.whole(2)
    for length in (4, 4, 7, 1, 4):
        arrays = [ones(1, length), ones(2, length)]
        wait(*(rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)))
        np.testing.assert_array_equal(arrays[1], np.full(length, 3))


def test_gather_broadcast_exchange_and_barrier(process_set: Set) -> None:
    ranks = process_set.whole(2, ranks=[3, 8])
    gathered: list[dict[int, Array]] = [{}, {}]
    swapped: list[dict[int, Array]] = [{}, {}]
    roots = [ones(7), ones(9)]
    handles, swaps = [], []

    def allocate(into: dict[int, Array], index: int, rows: int) -> Array:
        into[index] = np.zeros((rows, 2), np.float32)
        return into[index].reshape(-1)

    for index, rank in enumerate(ranks):
        rows = np.full((index + 1, 2), index, np.float32)
        spec = (TensorSpec("g", DataType.FLOAT32, rows.shape),)
        gather = Request(Operation.ALLGATHER, "g", spec)
        handles.append(rank.submit(gather, rows, allocate=partial(allocate, gathered[index])))
        spec = (TensorSpec("b", DataType.FLOAT32, (4,)),)
        handles.append(rank.submit(Request(Operation.BROADCAST, "b", spec, root=8), roots[index]))
        mine = np.arange(6, dtype=np.float32).reshape(3, 2) + 100 * index
        spec = (TensorSpec("s", DataType.FLOAT32, mine.shape),)
        exchange = Request(Operation.ALLTOALL, "s", spec, splits=((1, 2), (3, 0))[index])
        swaps.append(rank.submit(exchange, mine, allocate=partial(allocate, swapped[index])))
        handles.append(rank.submit(Request(Operation.BARRIER, "barrier.noname", transient=True)))
    wait(*handles, *swaps)
    for index in (0, 1):
        np.testing.assert_array_equal(gathered[index][0], [[0, 0], [1, 1], [1, 1]])
        np.testing.assert_array_equal(roots[index], 9)
    assert [handle.result for handle in swaps] == [[1, 3], [2, 0]]
    np.testing.assert_array_equal(swapped[0][0], [[0, 1], [100, 101], [102, 103], [104, 105]])
    np.testing.assert_array_equal(swapped[1][0], [[2, 3], [4, 5]])


def test_a_joined_rank_contributes_zeros(process_set: Set) -> None:
    first, second = process_set.whole(2)
    array = ones(5)
    wait(*(rank.allreduce("x", ones()) for rank in (first, second)))
    joined = second.submit(JOIN)
    for _ in range(3):
        array = ones(5)
        wait(first.allreduce("x", array, ReduceOp.AVERAGE))
        np.testing.assert_array_equal(array, 2.5)
    assert not joined.done()
    last = first.submit(JOIN)
    wait(joined, last)
    assert (joined.result, last.result) == (0, 0)
    wait(*(rank.allreduce("x", ones()) for rank in (first, second)))


def test_what_ranks_disagree_on_fails_on_all_and_nothing_else_does(process_set: Set) -> None:
    ranks = process_set.whole(3, ranks=[2, 4, 6])
    odd = [rank.allreduce("odd", ones(1, 4 + (index == 1))) for index, rank in enumerate(ranks)]
    even = [rank.allreduce("even", ones()) for rank in ranks]
    texts = {error_of(handle) for handle in odd}
    assert len(texts) == 1
    (text,) = texts
    assert "Mismatched ALLREDUCE tensor shapes" in text
    assert "rank 4:" in text
    wait(*even)
    wait(*(rank.allreduce("odd", ones()) for rank in ranks))


# One request's fault


def broken(*_: object) -> Any:
    raise MemoryError("too large")


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("proposals", [False, True])
@pytest.mark.parametrize("operation", [Operation.ALLGATHER, Operation.ALLTOALL])
def test_an_output_that_one_rank_cannot_make_fails_there_alone(
    process_set: Set, operation: Operation, proposals: bool
) -> None:
    ranks = process_set.whole(2, proposals=proposals)
    outputs = [np.zeros(8, np.float32) for _ in ranks]
    request = Request(operation, "g", (TensorSpec("g", DataType.FLOAT32, (4,)),), splits=(2, 2))
    if operation is Operation.ALLGATHER:
        request = Request(operation, "g", request.tensors)
    texts: list[str] = []

    def script(rank: Rank) -> None:
        index = rank.worker.index
        handle = rank.submit(request, ones(index), allocate=broken if index else lambda _, rows: outputs[0][:rows])
        try:
            handle.wait()
        except HorovodInternalError as error:
            texts.append(f"{index}: {error}")

    on_every_rank(ranks, script)
    rows = 8 if operation is Operation.ALLGATHER else 4
    text = f"the output of 'g' ({rows} rows) could not be made on this rank: MemoryError: too large"
    assert texts == [f"1: {text}"]
    assert outputs[0][:rows].tolist() == [0.0] * (rows // 2) + [1.0] * (rows // 2)
    wait(*(rank.allreduce("x", ones()) for rank in ranks))
    assert [rank.watch.reports for rank in ranks] == [[]] * 2


def test_a_callback_that_raises_ends_no_job(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    ranks = process_set.whole(2)
    handles = [rank.allreduce("x", ones()) for rank in ranks]
    for handle in handles:
        handle.then(broken)
    wait(*handles)
    wait(*(rank.allreduce("x", ones()) for rank in ranks))
    assert [rank.watch.reports for rank in ranks] == [[]] * 2
    assert "a callback at the end of a collective failed" in caplog.text


# Fusion


def hold(rank: Rank) -> tuple[threading.Event, threading.Event]:
    """Make the rank's next collective wait; returns "it has begun" and "go on"."""
    begun, go_on = threading.Event(), threading.Event()

    def before() -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    rank.communicator.before = before
    return begun, go_on


def busy_then(ranks: Sequence[Rank], submit: Callable[[Rank], list[Handle]]) -> None:
    """Submit while the coordinator's worker thread is in a collective; wait for the end of all."""
    begun, go_on = hold(ranks[0])
    handles = [rank.allreduce("first", ones()) for rank in ranks]
    assert begun.wait(SECONDS)
    for rank in ranks[1:]:
        handles += submit(rank)
    handles += submit(ranks[0])
    threading.Event().wait(0.05)  # the members' announcements wait in the sockets by then
    ranks[0].communicator.before = lambda: None
    go_on.set()
    wait(*handles)


def test_what_gathers_while_the_worker_is_busy_travels_together(process_set: Set) -> None:
    ranks = process_set.whole(2)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(20)])
    for rank in ranks:
        assert sum(rank.communicator.batches) == 21
        assert max(rank.communicator.batches) > 1
    assert ranks[0].communicator.batches == ranks[1].communicator.batches


def test_nobody_waits_in_a_batch_for_ranks_that_have_only_a_part_of_its_order(process_set: Set) -> None:
    """The order is longer than the socket holds, and the other rank is slow to read it."""
    rank, peers = process_set.part(0, 2)
    rank.worker._connections._channels[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    requests = [allreduce_request(f"{number}".zfill(100), transient=True) for number in range(300)]
    unsent: list[bool] = []
    rank.communicator.before = lambda: unsent.append(rank.worker._connections.unsent())
    handles = [rank.submit(each, ones(1, 1)) for each in requests]
    peers[1].say(Announce([Definition(-1, each) for each in requests]))
    wait_until(lambda: rank.worker._connections.unsent() or unsent, "an order that does not fit")
    left = len(requests)
    while left:
        left -= sum(map(len, peers[1].ordered()))
    wait(*handles)
    assert unsent and not any(unsent)


def test_no_batch_is_larger_than_the_threshold(process_set: Set) -> None:
    ranks = process_set.whole(2, fusion_threshold=3 * 16)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(20)])
    assert max(ranks[0].communicator.batches) <= 3
    assert sum(ranks[0].communicator.batches) == 21


@pytest.mark.parametrize("settings", [{"fusion_threshold": 0}, {"disable_group_fusion": True}])
def test_fusion_that_is_turned_off(process_set: Set, settings: dict[str, Any]) -> None:
    ranks = process_set.whole(2, **settings)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(10)])
    assert ranks[0].communicator.batches == ranks[1].communicator.batches == [1] * 11


def test_what_cannot_travel_together_does_not(process_set: Set) -> None:
    ranks = process_set.whole(2)
    ops = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVERAGE]

    def submit(rank: Rank) -> list[Handle]:
        return [rank.allreduce(f"n{number}", ones(number), ops[number % 3]) for number in range(12)]

    busy_then(ranks, submit)
    assert max(ranks[0].communicator.batches) <= 4


def test_a_gathering_window_waits_for_more(process_set: Set) -> None:
    ranks = process_set.whole(2, cycle_time=timedelta(seconds=1))
    handles = [rank.allreduce("a", ones()) for rank in ranks]
    wait_until(lambda: ranks[0].worker.role._negotiator.has_ready, "the decision")  # type: ignore[attr-defined]
    handles += [rank.allreduce("b", ones()) for rank in ranks]
    wait(*handles)
    assert ranks[0].communicator.batches == ranks[1].communicator.batches == [2]


# Names


def test_a_name_in_flight_cannot_be_submitted_again(process_set: Set) -> None:
    first, second = process_set.whole(2)
    handle = first.allreduce("x", ones())
    with pytest.raises(ValueError, match=r"same name as another tensor that is currently being processed.*'x'"):
        first.allreduce("x", ones())
    wait(second.allreduce("x", ones()), handle)
    wait(first.allreduce("x", ones()), second.allreduce("x", ones()))


# The end


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_who_leaves_ends_the_set_for_all_and_is_named(process_set: Set, leaver: int) -> None:
    ranks = process_set.whole(3, ranks=[5, 6, 7])
    wait(*(rank.allreduce("done", ones()) for rank in ranks))
    pending = [(index, rank.allreduce("pending", ones())) for index, rank in enumerate(ranks) if index != leaver]
    ranks[leaver].worker.leave("it had enough")
    for rank in ranks:
        assert rank.worker.join(10)
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
        assert rank.worker.join(10)
        assert [interrupted for _, _, interrupted in rank.stopped] == [False]


def test_what_was_decided_before_somebody_left_still_runs(process_set: Set) -> None:
    ranks = process_set.whole(2, cycle_time=timedelta(seconds=SECONDS))
    arrays = [ones(1), ones(2)]
    handles = [rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)]
    wait_until(lambda: ranks[0].worker.role._negotiator.has_ready, "the decision")  # type: ignore[attr-defined]
    ranks[1].worker.leave("done")
    wait(*handles)
    np.testing.assert_array_equal(arrays[0], 3)
    for rank in ranks:
        assert rank.worker.join(10)


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
    assert first.worker.join(10)
    with pytest.raises(HorovodInternalError, match="rank 9 failed"):
        first.allreduce("z", ones())
    second.worker.interrupt()
    go_on.set()
    second.worker.abort(HorovodInternalError("rank 9 failed"))
    assert error_of(handles[1]) == "rank 9 failed"
    assert second.worker.join(10)
    assert second.watch.reports == []


def in_thread(function: Callable[[], None]) -> threading.Thread:
    """Run it beside the test; to be joined."""
    thread = threading.Thread(target=function)
    thread.start()
    return thread


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


def test_who_learns_that_tensors_may_still_be_written_is_told_so(process_set: Set) -> None:
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
        assert rank.worker.join(10)
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
    assert rank.worker.join(10)
    assert rank.watch.reports == []
    aborts[0].join(SECONDS)
    assert rank.communicator.batches == [1]
    assert caplog.text == ""


def test_an_engine_that_was_aborted_reports_nobody(process_set: Set) -> None:
    rank, _ = process_set.part(0, 1)

    def aborted() -> None:
        raise Aborted

    rank.communicator.before = aborted
    handle = rank.allreduce("x", ones())
    rank.worker.abort(HorovodInternalError("the failure"))
    assert rank.worker.join(10)
    assert error_of(handle) == "the failure"
    assert rank.watch.reports == []


@pytest.mark.parametrize("failure", [PeerFailure(0, "it went silent"), Aborted(), ZeroDivisionError("oh")])
def test_that_nothing_waits_for_a_failure_that_never_comes(process_set: Set, failure: Exception) -> None:
    rank, _ = process_set.part(0, 1, timeout=timedelta(milliseconds=50))

    def fail() -> None:
        raise failure

    rank.communicator.before = fail
    handles = [rank.allreduce("x", ones()), rank.allreduce("y", ones())]
    assert rank.worker.join(10)
    for handle in handles:
        assert error_of(handle).endswith("Rank 0 has not said in time which rank failed first.")


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
    assert rank.worker.join(10)
    assert rank.watch.reports == [(0, "its worker thread failed: ZeroDivisionError('oh')", False)]
    assert "the worker thread of process set [0] failed" in caplog.text


def test_an_overflow_in_a_gradient_is_no_warning(process_set: Set, recwarn: pytest.WarningsRecorder) -> None:
    ranks = process_set.whole(2)
    arrays = [ones(3e38), ones(3e38)]
    wait(*(rank.allreduce("x", array) for rank, array in zip(ranks, arrays, strict=True)))
    assert np.isinf(arrays[0]).all()
    assert not recwarn.list


# Peers that break the rules


BAD = [b"", b"\xc1", b"\x91\x00", encode(Stop(0, "not yours to say")), encode([0, [1.5]])]
MEANINGLESS = [
    encode([0, [[0, [42, "x", []]]]]),
    encode([0, [[0, [0, "x", [["x", 99, [4]]]]]]]),
    encode([0, [[0, [0, "x", [["x", 7, [4]]], 77]]]]),
]
"""An operation, a type and a reduction that do not exist."""
UNDEFINED = [
    Announce([3]),
    Announce([Definition(1 << 30, allreduce_request("x"))]),
    Announce([Definition(0, allreduce_request("x")), 0]),
]


@pytest.mark.parametrize("body", [*BAD, *MEANINGLESS])
def test_a_member_that_sends_what_is_no_message_is_cut_off_and_suspected(process_set: Set, body: bytes) -> None:
    rank, peers = process_set.part(0, 3)
    peers[1].channel.send(body)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (1, True)
    assert "it broke the protocol" in reason
    assert rank.worker._thread.is_alive()


@pytest.mark.parametrize("message", UNDEFINED)
def test_a_member_that_breaks_the_protocol_is_cut_off_and_suspected(process_set: Set, message: Announce) -> None:
    """A number that was never defined, one beyond the capacity, a name announced twice."""
    rank, peers = process_set.part(0, 3)
    peers[2].say(message)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (2, True)
    assert "it broke the protocol" in reason


@pytest.mark.parametrize("body", [*BAD[:3], encode(Leave("not yours to say")), encode(Order([[5]]))])
def test_a_coordinator_that_breaks_the_protocol_is_cut_off_and_suspected(process_set: Set, body: bytes) -> None:
    rank, peers = process_set.part(1, 2)
    handle = rank.allreduce("x", ones())
    peers[0].announced()
    peers[0].channel.send(body)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (0, True)
    assert "it broke the protocol" in reason
    later = rank.allreduce("y", ones())  # nobody to tell, and no reason to fail
    rank.worker.abort(HorovodInternalError("the failure"))
    assert error_of(handle) == error_of(later) == "the failure"
    assert len(rank.watch.reports) == 1


def test_a_huge_length_is_cut_off_and_suspected(process_set: Set) -> None:
    rank, peers = process_set.part(0, 2)
    peers[1].channel.socket.send(b"\xff\xff\xff\xff")
    wait_until(lambda: rank.watch.reports, "the report")
    assert rank.watch.reports[0][::2] == (1, True)


@pytest.mark.parametrize("index", [0, 1])
def test_a_channel_that_closes_is_suspected(process_set: Set, index: int) -> None:
    rank, peers = process_set.part(index, 2)
    (peer,) = peers
    peers[peer].channel.close()
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (peer, True)
    assert "its control connection broke" in reason
    assert rank.worker._thread.is_alive()


def test_submitting_to_a_coordinator_that_has_gone_accuses_only_the_coordinator(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2, start=False)
    peers[0].channel.close()
    first = rank.allreduce("x", ones())
    rank.worker.start()
    wait_until(lambda: rank.watch.reports, "the report")
    second = rank.allreduce("y", ones())
    rank.worker.leave("done")
    threading.Event().wait(0.05)
    assert [report[0] for report in rank.watch.reports] == [0]
    rank.worker.abort(HorovodInternalError("rank 0 failed"))
    assert error_of(first) == error_of(second) == "rank 0 failed"


def test_what_the_coordinator_said_before_it_closed_is_heard(process_set: Set) -> None:
    """It stopped in good order and was gone before this rank had announced its next wish."""
    rank, peers = process_set.part(1, 2, start=False)
    peers[0].say(Stop(0, "it is done"))
    peers[0].channel.close()
    handle = rank.allreduce("x", ones())
    rank.worker.start()
    assert "This was caused by rank 0: it is done" in error_of(handle)
    assert rank.worker.join(10)
    assert rank.watch.reports == []


def test_a_member_that_leaves_when_the_coordinator_is_gone_ends_with_the_abort(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    peers[0].channel.close()
    wait_until(lambda: rank.watch.reports, "the report")
    rank.worker.leave("done")
    rank.worker.abort(HorovodInternalError("rank 0 failed"))
    assert rank.worker.join(10)
    assert len(rank.watch.reports) == 1


# What travels


def test_the_second_time_a_few_bytes_say_it_all(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    request = allreduce_request("a.rather.long.name.of.a.layer", (4,))
    decision = Decision(0, request.name, request.operation)
    for turn in range(3):
        handle = rank.submit(request, ones())
        assert peers[0].announced() == ([Definition(0, request)] if turn == 0 else [0])
        peers[0].say(Order([[decision if turn == 0 else 0]]))
        wait(handle)


def test_the_coordinator_orders_in_full_once_and_then_by_number(process_set: Set) -> None:
    rank, peers = process_set.part(0, 2)
    request = allreduce_request("x", (4,))
    for turn in range(3):
        handle = rank.submit(request, ones())
        peers[1].say(Announce([Definition(0, request)] if turn == 0 else [0]))
        ((item,),) = peers[1].ordered()
        if turn == 0:
            assert item.name == "x"
            known = item.identifier
        else:
            assert item == known
        wait(handle)


def test_several_orders_in_one_piece(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    handles = [rank.allreduce(name, ones()) for name in "abc"]
    orders = [encode(Order([[Decision(-1, name, Operation.ALLREDUCE)]])) for name in "abc"]
    peers[0].channel.socket.sendall(b"".join(map(frame, orders)))
    wait(*handles)


def test_a_burst_of_announcements_does_not_wait_for_a_peer_that_reads_slowly(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    rank.worker._connections._channels[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    names = [f"{number:04}" + "x" * 2000 for number in range(500)]
    for name in names:
        rank.submit(allreduce_request(name), ones(1, 1))
    heard: list[str] = []
    while len(heard) < len(names):
        heard += [item.request.name for item in peers[0].announced()]
    assert heard == names


# Waiting


def test_an_idle_worker_asks_nobody_and_one_that_waits_does(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2, timeout=timedelta(seconds=0.15))
    threading.Event().wait(0.2)
    assert rank.watch.probes == 0
    handle = rank.allreduce("x", ones())
    wait_until(lambda: rank.watch.probes >= 2, "two questions")
    peers[0].say(Order([[Decision(-1, "x", Operation.ALLREDUCE)]]))
    wait(handle)


def test_a_stall_is_reported_with_all_that_is_known(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, peers = process_set.part(0, 3, stall_warning_time=timedelta(seconds=0.1))
    rank.watch.call_sites[2] = "train.py:77 in validate"
    rank.allreduce("grad", ones(), caller="train.py:12")
    peers[1].say(Announce([Definition(0, allreduce_request("grad", (4,)))]))
    with caplog.at_level(logging.WARNING, "horovod.core"):
        wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the report")
    assert "2: [grad] (it is at train.py:77 in validate)" in caplog.text
    assert "grad was submitted as: allreduce(Sum) float32 [4] at train.py:12" in caplog.text
    assert rank.watch.reports == []


def test_a_rank_that_waits_in_join_for_others_is_reported(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 3, stall_warning_time=timedelta(seconds=0.1))
    rank.watch.call_sites[2] = "train.py:77 in validate"
    rank.submit(Request(Operation.JOIN, "join.noname", caller="train.py:12", transient=True))
    with caplog.at_level(logging.WARNING, "horovod.core"):
        wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the report")
    assert "1: [join.noname]" in caplog.text
    assert "2: [join.noname] (it is at train.py:77 in validate)" in caplog.text
    assert "join.noname was submitted as: join at train.py:12" in caplog.text


def test_a_stall_that_lasts_ends_the_job(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(
        0, 3, stall_warning_time=timedelta(seconds=0.05), stall_shutdown_time=timedelta(seconds=0.1)
    )
    rank.allreduce("grad", ones())
    wait_until(lambda: rank.watch.reports, "the end")
    who, text, suspected = rank.watch.reports[0]
    assert (who, suspected) == (1, False)
    assert "1!: [grad]" in text
    assert "2!: [grad]" in text
    assert "Will shutdown." in text
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_stall_check_that_is_off_says_nothing(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 2, stall_warning_time=timedelta(seconds=0.02), stall_check=False)
    rank.allreduce("grad", ones())
    threading.Event().wait(0.2)
    assert caplog.text == ""


def test_a_shutdown_time_below_the_warning_time_is_off(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(
        0, 2, stall_warning_time=timedelta(seconds=0.1), stall_shutdown_time=timedelta(seconds=0.01)
    )
    assert "is off" in caplog.text
    rank.allreduce("grad", ones())
    wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the warning")
    assert rank.watch.reports == []


# Resources


def test_what_a_forked_child_must_close(process_set: Set) -> None:
    rank, _ = process_set.part(0, 3)
    descriptors = rank.worker.descriptors()
    assert len(set(descriptors)) == 4
    for descriptor in descriptors:
        os.fstat(descriptor)


def test_a_worker_can_be_bound_to_a_core(process_set: Set) -> None:
    core = min(os.sched_getaffinity(0))
    rank, _ = process_set.part(0, 1, start=False)
    rank.worker._placement = CpuPlacement(core)
    found: list[set[int]] = []
    rank.communicator.before = lambda: found.append(os.sched_getaffinity(0))
    rank.worker.start()
    wait(rank.allreduce("x", ones()))
    assert found == [{core}]


def test_a_core_that_this_machine_does_not_have_is_an_error_in_the_log_and_nothing_else(
    process_set: Set, caplog: pytest.LogCaptureFixture
) -> None:
    rank, _ = process_set.part(0, 1, start=False)
    rank.worker._placement = CpuPlacement(1_000_000)
    rank.worker.start()
    wait(rank.allreduce("x", ones()))
    assert "core 1000000" in caplog.text


@pytest.mark.parametrize("share", [{0}, {1_000_000}])
def test_what_is_large_is_carried_out_on_the_cores_that_fall_to_this_rank(process_set: Set, share: set[int]) -> None:
    """On any, where they are not to be had."""
    everywhere = os.sched_getaffinity(0)
    cores = {min(everywhere)} if share == {0} else share
    rank, _ = process_set.part(0, 1, start=False)
    rank.worker._placement = rank.worker.executor._placement = CpuPlacement(share=frozenset(cores))
    found: list[set[int]] = []
    rank.communicator.before = lambda: found.append(os.sched_getaffinity(0))
    rank.worker.start()
    for length in (4, LARGE, 4):
        handle = rank.allreduce("x", ones(length=length))
        handle.leave_to_worker()
        wait_until(handle.done, "the worker thread")
    assert found == [everywhere, cores & everywhere or everywhere, everywhere]


def test_a_submission_at_the_moment_in_which_the_worker_looks_for_its_oldest(
    process_set: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = process_set.part(1, 2)
    threads: list[threading.Thread] = []

    def interrupted_iter(thing: Any) -> Any:
        """What another thread does between two steps of this one."""
        made = iter(thing)
        name = f"n{len(threads)}"
        threads.append(threading.Thread(target=lambda: rank.allreduce(name, ones())))
        threads[-1].start()
        threads[-1].join(0.1)
        return made

    monkeypatch.setattr(requests_module, "iter", interrupted_iter, raising=False)
    rank.allreduce("first", ones())
    wait_until(lambda: threads, "the interruption")
    threading.Event().wait(0.1)
    monkeypatch.undo()
    assert rank.worker._thread.is_alive()
    assert rank.watch.reports == []
    for thread in threads:
        thread.join(10)


def test_several_threads_submit_at_the_same_time(process_set: Set) -> None:
    ranks = process_set.whole(2)
    handles: list[Handle] = []

    def train(rank: Rank, thread: int) -> None:
        for number in range(40):
            handle = rank.allreduce(f"{thread}.{number}", ones())
            handles.append(handle)
            if number % 5 == 0:
                handle.wait(SECONDS)

    threads = [threading.Thread(target=train, args=(rank, number)) for number in range(3) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    wait(*handles)
    assert len(handles) == 240


def test_leaving_at_the_moment_in_which_the_worker_reads_its_wake_up(process_set, monkeypatch):
    """Its byte in the pipe goes with the one that is read; the wish must not."""
    rank, _ = process_set.part(0, 1)
    real, once = os.read, []

    def read(descriptor, length):
        if descriptor == rank.worker._connections._wake_up.fileno() and not once:
            once.append(1)
            rank.worker.leave("done")
        return real(descriptor, length)

    monkeypatch.setattr(os, "read", read)
    rank.worker._connections.wake()  # a submission rings only where the worker thread is asleep
    assert rank.worker.join(5)
    assert once


# The timeline


def test_a_timeline_that_another_thread_stops_at_any_moment_ends_no_job(
    process_set: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two looks at it."""
    timeline = Timeline(str(tmp_path / "timeline.json"))
    looks = itertools.count()
    attribute = property(lambda _: timeline if next(looks) % 2 == 0 else None, lambda *_: None)
    monkeypatch.setattr(Coordinator, "timeline", attribute, raising=False)
    ranks = process_set.whole(2)
    for turn in range(50):
        wait(*(rank.allreduce(f"n{turn % 7}", ones()) for rank in ranks))
    timeline.close()
    assert [rank.watch.reports for rank in ranks] == [[]] * 2


# Turns that a waiting thread takes


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
@pytest.mark.parametrize("proposals", [False, True])
def test_an_engine_is_told_whether_the_thread_that_calls_it_waits(process_set: Set, proposals: bool) -> None:
    """A thread that waits has no other use for its core, so the engine may poll longer before it sleeps."""
    ranks = process_set.whole(2, proposals=proposals)
    told: list[tuple[bool, bool]] = []
    for rank in ranks:

        def before(rank: Rank = rank) -> None:
            told.append((threading.current_thread().name.startswith("script"), rank.communicator.by_waiting_thread))

        rank.communicator.before = before

    def waits(rank: Rank) -> None:
        for turn in range(5):
            rank.submit(allreduce_request(f"x{turn}", (MEDIUM,)), ones(length=MEDIUM), awaited=True).wait()

    on_every_rank(ranks, waits)
    wait(*(rank.allreduce("large", ones(length=LARGE)) for rank in ranks))
    assert len(told) == 12 and (True, True) in told and (False, False) in told
    assert (True, False) not in told
    assert not any(rank.communicator.by_waiting_thread for rank in ranks)


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
def test_who_does_not_wait_himself_is_served_by_the_workers_thread_at_once(
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
def test_what_nobody_waits_for_is_done_too_after_small_ones(process_set: Set) -> None:
    ranks = process_set.whole(2)

    def script(rank: Rank) -> None:
        for _ in range(20):
            rank.allreduce("waited", ones()).wait()
            alone = rank.allreduce("alone", ones())
            wait_until(alone.done, "a collective that nobody waits for")
            assert alone.error is None

    on_every_rank(ranks, script)


def test_who_waits_hears_of_an_orderly_end_and_the_workers_thread_sees_no_loss_in_what_follows(
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
def test_who_waits_carries_out_whatever_is_quick(process_set: Set, length: int) -> None:
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
def test_a_wait_for_a_late_peer_can_be_given_up_and_goes_on_without(process_set: Set) -> None:
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
    assert first.worker.join(5)


@pytest.mark.usefixtures("cores")
def test_a_waiting_thread_that_another_interrupts_from_inside_takes_the_worker_with_it(process_set: Set) -> None:
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
def test_after_a_failure_no_thread_takes_a_turn_before_the_failure(process_set: Set, length: int) -> None:
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


def test_a_worker_that_was_closed_writes_to_no_file_of_the_script(process_set: Set) -> None:
    """A thread of the script may still hold a handle, and ask for more haste."""
    rank, _ = process_set.part(0, 1)
    handle = Handle()
    rank.worker.leave("done")
    assert rank.worker.join(10)
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
