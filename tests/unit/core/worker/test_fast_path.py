"""Quick collectives without an order of the coordinator, and how those find back to it that cannot be carried out so."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from engines import propose
from horovod.comm.base import PeerFailure
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.shm.proposals import Proposals
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Definition,
    Operation,
    Order,
    Request,
    Stop,
    Succeeded,
    TensorSpec,
    decode_from_coordinator,
    decode_from_member,
)
from horovod.core.requests.batch import Batch
from horovod.core.requests.handle import Handle
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.fast_path import FAST_PATH, TOGETHER
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    JOIN,
    LARGE,
    MEDIUM,
    SECONDS,
    NotingTimeline,
    Peer,
    Rank,
    Set,
    abort_when_reported,
    allreduce_request,
    asleep,
    error_of,
    is_asleep,
    on_every_rank,
    ones,
    wait,
)

pytestmark = pytest.mark.usefixtures("cores")


def successes(ranks: Sequence[Rank]) -> list[tuple[int, str]]:
    """Which rank carried out what by fast path, as their flight recorders have it."""
    found: list[tuple[int, str]] = []
    for rank in ranks:
        recorder = rank.worker.recorder
        assert recorder is not None and recorder.count == len(recorder.ring), "too many for the recorder"
        found += [(rank.worker.index, each.request.name) for each in recorder.ring if each.engine == FAST_PATH]
    return found


def nothing_is_left(ranks: Sequence[Rank]) -> None:
    """Ends the ranks: nothing is in flight, and nothing is announced that was carried out already."""
    assert [rank.worker.pending() for rank in ranks] == [0] * len(ranks)
    for rank in ranks:
        rank.worker.leave("done")
    for rank in ranks:
        assert rank.worker.join(SECONDS)
        assert rank.watch.reports == []
        assert [interrupted for _, _, interrupted in rank.stopped] == [False]


def failing(rank: Rank) -> tuple[Handle, weakref.ref[Array]]:
    """A submission, and its tensor, which nothing else refers to."""
    array = ones()
    return rank.allreduce("x", array), weakref.ref(array)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries that nobody gives up for want of time, however busy the machine is."""
    monkeypatch.setattr("horovod.core.worker.fast_path.SLEEPS", 10_000)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_small_collectives_need_no_order(process_set: Set, size: int) -> None:
    """In every other turn the worker thread may have announced them before the script waits."""
    ranks = process_set.whole(size, proposals=True)

    def script(rank: Rank) -> None:
        index = rank.worker.index
        for turn in range(200):
            awaited = turn % 2 == 1
            array = ones(index + turn)
            average = allreduce_request("x", (4,), ReduceOp.AVERAGE, postscale=2.0)
            rank.submit(average, array, awaited=awaited).wait()
            np.testing.assert_allclose(array, 2 * (turn + (size - 1) / 2))
            array = ones(index)
            spec = (TensorSpec("b", DataType.FLOAT32, (4,)),)
            rank.submit(Request(Operation.BROADCAST, "b", spec, root=size - 1), array, awaited=awaited).wait()
            assert array[0] == size - 1
            rank.submit(Request(Operation.BARRIER, "barrier.noname", transient=True), awaited=awaited).wait()

            assert gathered(rank, index + turn % 2, 3, awaited).tolist() == [
                float(each) for each in range(size) for _ in range(3 * (each + turn % 2))
            ]
            dealt(rank, turn, awaited=awaited)
            reduced_shards(rank, turn, awaited)

    on_every_rank(ranks, script)
    carried_out = successes(ranks)
    for name in ("x", "b", "g", "s", "r", "barrier.noname"):
        counts = {index: carried_out.count((index, name)) for index in range(size)}
        assert len(set(counts.values())) == 1  # all ranks take the same way
        assert counts[0] > 0
    nothing_is_left(ranks)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_without_contributions_the_engine_moves_the_smallest_tensor(
    process_set: Set, orders: list[str], size: int
) -> None:
    ranks = asleep(process_set.whole(size, "tcp", proposals=True, contributions=False))
    moved: list[list[str]] = [[] for _ in ranks]

    def script(rank: Rank) -> None:
        index = rank.worker.index
        array, empty = ones(index), ones(length=0)
        rank.submit(allreduce_request("x", (4,)), array, awaited=True).wait()
        assert array[0] == sum(range(size))
        rank.submit(allreduce_request("nothing", (0,)), empty, awaited=True).wait()
        array = ones(index)
        spec = (TensorSpec("b", DataType.FLOAT32, (4,)),)
        rank.submit(Request(Operation.BROADCAST, "b", spec, root=size - 1), array, awaited=True).wait()
        assert array[0] == size - 1
        rank.submit(Request(Operation.BARRIER, "barrier.noname", transient=True), awaited=True).wait()
        for more in range(2):
            assert gathered(rank, index + more, 3, awaited=True).tolist() == [
                float(each) for each in range(size) for _ in range(3 * (each + more))
            ]
        dealt(rank, 1)

    for rank, calls in zip(ranks, moved, strict=True):
        rank.communicator.before = lambda calls=calls: calls.append(threading.current_thread().name)
    on_every_rank(ranks, script)
    assert not orders
    assert sorted(set(successes(ranks))) == sorted(
        (rank, name) for rank in range(size) for name in ("nothing", "barrier.noname")
    )
    assert [len(calls) for calls in moved] == [5] * size  # x, b, g twice, s


@pytest.mark.parametrize("shapes", [(), ((),), ((2,), (3,))], ids=["no tensor", "a scalar", "two tensors"])
def test_an_allgather_that_is_not_of_one_tensor_with_rows_is_ordered(
    process_set: Set, orders: list[str], shapes: tuple[tuple[int, ...], ...]
) -> None:
    """A coordinator refuses a scalar; the ranks go on."""

    def script(rank: Rank) -> None:
        arrays = [ones(rank.worker.index, math.prod(shape)) for shape in shapes]
        specs = tuple(TensorSpec(f"{each}", DataType.FLOAT32, shape) for each, shape in enumerate(shapes))
        request = Request(Operation.ALLGATHER, "odd", specs)
        handle = rank.submit(request, *arrays, allocate=lambda index, total: np.empty(total, np.float32), awaited=True)
        with suppress(HorovodInternalError, ValueError):
            handle.wait()
        rank.submit(allreduce_request("x", (4,)), ones(rank.worker.index), awaited=True).wait()

    on_every_rank(process_set.whole(2, proposals=True), script)
    assert "odd" in orders


def gathered(rank: Rank, rows: int, columns: int, awaited: bool = False) -> Array:
    """What an allgather of so many rows of every rank's number makes."""
    made: list[Array] = []

    def allocate(_: int, total: int) -> Array:
        made.append(np.full(total * columns, -1, np.float32))
        return made[0]

    request = Request(Operation.ALLGATHER, "g", (TensorSpec("g", DataType.FLOAT32, (rows, columns)),))
    handle = rank.submit(request, ones(rank.worker.index, rows * columns), allocate=allocate, awaited=awaited)
    handle.wait()
    (received,) = handle.result
    assert received[rank.worker.index] == rows and sum(received) * columns == made[0].size
    return made[0]


def reduced_shards(rank: Rank, turn: int, awaited: bool = True) -> None:
    """A reducescatter of two tensors, the average of whose ranks is known."""
    index, size = rank.worker.index, len(rank.worker.ranks)
    shapes = [(size + 1, 2), (2 * size - 1, 3)]
    wholes = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + turn for shape in shapes]
    specs = tuple(TensorSpec(f"r{number}", DataType.FLOAT32, shape) for number, shape in enumerate(shapes))
    inputs = [(whole + index).reshape(-1) for whole in wholes]
    expected = [np.array_split(whole + (size - 1) / 2, size)[index].reshape(-1) for whole in wholes]
    outputs = [np.full(part.size, -1, np.float32) for part in expected]
    request = Request(Operation.REDUCESCATTER, "r", specs, ReduceOp.AVERAGE)
    rank.submit(request, *inputs, outputs=outputs, awaited=awaited).wait()
    for output, part in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, part, rtol=1e-6)


def sent(sender: int, receiver: int, turn: int, many: int = 1) -> int:
    """How many rows go from a rank to another: ``many`` times as many from the rank whose turn it is."""
    return (sender + receiver + turn) % 3 * (many if sender == turn % 3 else 1)


def dealt(rank: Rank, turn: int, many: int = 1, columns: int = 2, awaited: bool = True) -> None:
    """An alltoall of rows of 10 s + r from rank s to rank r; each rank has one row more, which goes to nobody."""
    index, size = rank.worker.index, len(rank.worker.ranks)
    splits = tuple(sent(index, receiver, turn, many) for receiver in range(size))
    rows = np.repeat(np.array([*(10 * index + receiver for receiver in range(size)), -1], np.float32), [*splits, 1])
    made: list[Array] = []

    def allocate(_: int, total: int) -> Array:
        made.append(np.full(total * columns, -2, np.float32))
        return made[0]

    spec = (TensorSpec("s", DataType.FLOAT32, (len(rows), columns)),)
    request = Request(Operation.ALLTOALL, "s", spec, splits=splits)
    handle = rank.submit(request, np.repeat(rows, columns), allocate=allocate, awaited=awaited)
    handle.wait()
    received = [sent(sender, index, turn, many) for sender in range(size)]
    assert list(handle.result) == received
    expected = np.repeat([10 * sender + index for sender in range(size)], received)
    np.testing.assert_array_equal(made[0], np.repeat(expected, columns))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_an_alltoall_may_differ_and_other_dimensions_may_not(
    process_set: Set, orders: list[str], size: int
) -> None:
    ranks = asleep(process_set.whole(size, proposals=True))

    def script(rank: Rank) -> None:
        for turn in range(12):
            dealt(rank, turn)
            dealt(rank, turn, many=5_000)  # too many for the proposal of one rank

    on_every_rank(ranks, script)
    assert orders == []
    carried_out = successes(ranks)
    assert len(carried_out) >= 12 * size and set(carried_out) == {(index, "s") for index in range(size)}

    def mismatched(rank: Rank) -> None:
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            dealt(rank, 0, columns=1 + rank.worker.index)

    on_every_rank(ranks, mismatched)
    on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
def test_rows_may_differ_and_other_dimensions_may_not(process_set: Set) -> None:
    ranks = process_set.whole(2, proposals=True)

    def script(rank: Rank) -> None:
        for turn in range(20):
            assert gathered(rank, 2, 2).tolist() == [0.0] * 4 + [1.0] * 4
            if turn % 4 == 0:
                with pytest.raises(HorovodInternalError, match="Mismatched"):
                    gathered(rank, 1, 2 + rank.worker.index)
            assert gathered(rank, 10_000 * rank.worker.index, 1).size == 10_000  # large on one of them

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
def test_a_thread_that_waits_at_once_wakes_no_other_thread(process_set: Set) -> None:
    ranks = asleep(process_set.whole(3, proposals=True))

    def script(rank: Rank) -> None:
        for turn in range(100):
            array = ones(turn)
            rank.submit(allreduce_request("x", (4,)), array, awaited=True).wait()
            assert array[0] == 3 * turn

    on_every_rank(ranks, script)
    assert len(successes(ranks)) == 300
    assert all(is_asleep(rank.worker) for rank in ranks)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what the coordinator's rank carries out by an order."""
    found: list[str] = []
    real = Coordinator.record

    def record(coordinator: Coordinator, batch: Batch) -> AbstractContextManager[None]:
        found.extend(decision.name for decision, _ in batch)
        return real(coordinator, batch)

    monkeypatch.setattr(Coordinator, "record", record)
    return found


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_several_requests_need_one_proposal(process_set: Set, orders: list[str], size: int) -> None:
    """Of any types and operations, in any order of their waits; one of them may be too large to be part of it."""
    ranks = asleep(process_set.whole(size, proposals=True))

    def script(rank: Rank) -> None:
        index = rank.worker.index
        for turn in range(20):
            sums, large = ones(index + turn, 5), ones(turn, MEDIUM)
            root = np.full(3, index, np.float64)
            largest = np.array([index, -index], np.int64)
            handles = [
                rank.submit(allreduce_request("sums", (5,)), sums, awaited=True),
                rank.submit(allreduce_request("large", (MEDIUM,)), large, awaited=True),
                rank.submit(
                    Request(
                        Operation.ALLREDUCE, "largest", (TensorSpec("l", DataType.INT64, (2,)),), reduce_op=ReduceOp.MAX
                    ),
                    largest,
                    awaited=True,
                ),
                rank.submit(
                    Request(Operation.BROADCAST, "root", (TensorSpec("b", DataType.FLOAT64, (3,)),), root=1),
                    root,
                    awaited=True,
                ),
            ]
            for handle in handles if turn % 2 else reversed(handles):
                handle.wait()
            assert sums.tolist() == [sum(range(size)) + size * turn] * 5
            assert large[0] == large[-1] == size * turn
            assert largest.tolist() == [size - 1, 0]
            assert root.tolist() == [1] * 3

    on_every_rank(ranks, script)
    assert orders == []
    for index in range(size):
        for name in ("sums", "largest", "root"):
            assert successes(ranks).count((index, name)) == 20
        assert all(rank.communicator.batches == [1] * 20 for rank in ranks)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("many", [2, TOGETHER + 1])
def test_what_the_engine_moves_together_and_what_is_too_much_is_ordered(
    process_set: Set, orders: list[str], many: int
) -> None:
    ranks = asleep(process_set.whole(2, proposals=True))
    length = MEDIUM if many == 2 else 4

    def script(rank: Rank) -> None:
        for turn in range(5):
            arrays = [ones(turn + number, length) for number in range(many)]
            handles = [
                rank.submit(allreduce_request(f"x{number}", (length,)), array, awaited=True)
                for number, array in enumerate(arrays)
            ]
            handles[0].wait()
            for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
                handle.wait()
                assert array[0] == array[-1] == 2 * (turn + number)

    on_every_rank(ranks, script)
    assert sorted(orders) == sorted(5 * [f"x{number}" for number in range(many)])
    assert all(rank.communicator.batches == [many] * 5 for rank in ranks)


@pytest.mark.usefixtures("patient")
def test_ranks_that_submit_in_different_orders(process_set: Set) -> None:
    ranks = asleep(process_set.whole(2, proposals=True))

    def script(rank: Rank) -> None:
        for turn in range(20):
            arrays = {name: ones(number + turn) for number, name in enumerate("ab")}
            names = "ab" if rank.worker.index else "ba"
            handles = [rank.submit(allreduce_request(name, (4,)), arrays[name], awaited=True) for name in names]
            for handle in handles:
                handle.wait()
            assert [arrays["a"][0], arrays["b"][0]] == [2 * turn, 2 * (turn + 1)]

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_quick_requests_that_are_not_small_use_the_engine_without_an_order(
    process_set: Set, orders: list[str], size: int
) -> None:
    ranks = asleep(process_set.whole(size, proposals=True))

    def script(rank: Rank) -> None:
        for turn in range(20):
            array = ones(turn, MEDIUM)
            rank.submit(allreduce_request("x", (MEDIUM,)), array, awaited=True).wait()
            assert array[0] == array[-1] == size * turn
            array = ones(rank.worker.index, MEDIUM)
            spec = (TensorSpec("b", DataType.FLOAT32, (MEDIUM,)),)
            rank.submit(Request(Operation.BROADCAST, "b", spec, root=size - 1), array, awaited=True).wait()
            assert array[0] == array[-1] == size - 1
            shard = np.zeros(MEDIUM, np.float32)
            spec = (TensorSpec("r", DataType.FLOAT32, (size, MEDIUM)),)
            request = Request(Operation.REDUCESCATTER, "r", spec, reduce_op=ReduceOp.SUM)
            rank.submit(request, ones(turn, size * MEDIUM), outputs=[shard], awaited=True).wait()
            assert shard[0] == shard[-1] == size * turn
            # The rows of all ranks but the first are too many for a proposal.
            everything = gathered(rank, 1 + (MEDIUM if rank.worker.index else 0), 1, awaited=True)
            assert everything[0] == 0 and everything.size == size + (size - 1) * MEDIUM
            assert everything[-1] == size - 1
            small = ones(turn)
            rank.submit(allreduce_request("small", (4,)), small, awaited=True).wait()
            assert small[0] == size * turn

    on_every_rank(ranks, script)
    assert orders == []
    assert {name for _, name in successes(ranks)} == {"small"}
    assert all(rank.communicator.batches == [1] * 40 for rank in ranks)  # of allreduce and allgather


def test_large_requests_are_announced(process_set: Set, orders: list[str]) -> None:
    ranks = process_set.whole(2, proposals=True)

    def script(rank: Rank) -> None:
        for turn in range(3):
            array = ones(turn, LARGE)
            rank.submit(allreduce_request("x", (LARGE,)), array, awaited=True).wait()
            assert array[0] == array[-1] == 2 * turn

    on_every_rank(ranks, script)
    assert orders == ["x"] * 3


def test_a_peer_that_fails_inside_the_engine_fails_the_job(process_set: Set) -> None:
    first, second = process_set.whole(2, proposals=True)

    def fail() -> None:
        raise PeerFailure(0, "it is gone", suspected=True)

    def script(rank: Rank) -> None:
        with pytest.raises(HorovodInternalError, match="the failure"):
            for _ in range(1000):
                rank.allreduce("x", ones(length=MEDIUM)).wait()

    second.communicator.before = fail
    failure = abort_when_reported([second, first], "the failure")
    on_every_rank([first, second], script)
    failure.join(SECONDS)
    assert second.watch.reports == [(0, "it is gone", True)]


def test_an_awaited_one_that_is_asked_for_in_another_way_is_done(process_set: Set) -> None:
    ranks = asleep(process_set.whole(2, proposals=True))

    def script(rank: Rank) -> None:
        rank.submit(allreduce_request("x", (4,)), ones(), awaited=True).wait(SECONDS)  # with a limit

    on_every_rank(ranks, script)


def test_an_awaited_request_without_a_waiting_thread_runs_with_the_next_one(process_set: Set) -> None:
    ranks = asleep(process_set.whole(2, proposals=True))
    left = [rank.submit(allreduce_request("left", (4,)), ones(), awaited=True) for rank in ranks]
    wait(*(rank.allreduce("next", ones()) for rank in ranks))
    wait(*left)


def test_a_root_that_does_not_lead_and_global_ranks_that_are_no_indices(process_set: Set) -> None:
    ranks = process_set.whole(2, ranks=[3, 7], proposals=True)

    def script(rank: Rank) -> None:
        for root in [3, 7] * 50:
            array = ones(10 + rank.worker.index)
            spec = (TensorSpec("b", DataType.FLOAT32, (4,)),)
            rank.submit(Request(Operation.BROADCAST, f"b{root}", spec, root=root), array).wait()
            assert array.tolist() == [10.0 if root == 3 else 11.0] * 4

    on_every_rank(ranks, script)


@pytest.mark.parametrize("late", [0, 1], ids=["the coordinator", "a member"])
@pytest.mark.parametrize("seconds", [0.002, 0.03])
@pytest.mark.parametrize("length", [4, MEDIUM])
def test_a_rank_that_comes_late(process_set: Set, late: int, seconds: float, length: int) -> None:
    """Later than anybody waits for it, or not."""
    ranks = process_set.whole(2, proposals=True)

    def script(rank: Rank) -> None:
        for turn in range(30):
            if rank.worker.index == late and turn % 3 == 0:
                time.sleep(seconds)  # the lateness that the test is about
            array = ones(turn, length)
            rank.allreduce("x", array).wait()
            assert array[0] == array[-1] == 2 * turn

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_announces_ends_the_proposal_of_the_others(process_set: Set) -> None:
    """Whichever it is. They need not wait for their time to be over."""
    for ordinary in range(3):
        ranks = process_set.whole(3, proposals=True)

        def script(rank: Rank, ordinary: int = ordinary) -> None:
            for turn in range(60):
                array = ones(turn)
                handle = rank.allreduce("x", array)
                if rank.worker.index == ordinary and turn % 2:
                    handle.leave_to_worker()
                    wait_until(handle.done, "what somebody asks for")
                handle.wait()
                assert array[0] == 3 * turn

        on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
def test_different_names_at_the_same_time(process_set: Set) -> None:
    ranks = process_set.whole(2, proposals=True)

    def script(rank: Rank) -> None:
        for _ in range(60):
            arrays = {name: ones(number) for number, name in enumerate("ab", 1)}
            order = "ab" if rank.worker.index else "ba"
            first = rank.allreduce(order[0], arrays[order[0]])

            def other(name: str = order[1], array: Array = arrays[order[1]]) -> None:
                rank.allreduce(name, array).wait()

            helper = threading.Thread(target=other)
            helper.start()
            first.wait()
            helper.join(SECONDS)
            assert not helper.is_alive()
            assert [arrays["a"][0], arrays["b"][0]] == [2, 4]

    on_every_rank(ranks, script)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_mismatched_requests_fail_with_the_reason(process_set: Set, size: int) -> None:
    ranks = process_set.whole(size, proposals=True)

    def script(rank: Rank) -> None:
        for turn in range(20):
            rank.allreduce("x", ones()).wait()
            last = rank.worker.index == size - 1
            different = rank.allreduce("y", ones(length=5 if last and turn % 2 else 4))
            if turn % 2:
                assert "Mismatched" in error_of_own(different)
            else:
                different.wait()

    on_every_rank(ranks, script)


def error_of_own(handle: Handle) -> str:
    with pytest.raises(HorovodInternalError) as caught:
        handle.wait()
    return str(caught.value)


@pytest.mark.usefixtures("patient")
def test_ranks_may_call_from_different_lines(process_set: Set) -> None:
    ranks = asleep(process_set.whole(2, proposals=True))

    def script(rank: Rank) -> None:
        for _ in range(100):
            request = allreduce_request("x", (4,), caller=f"train.py:{rank.worker.index}")
            rank.submit(request, ones(), awaited=True).wait()

    on_every_rank(ranks, script)
    assert len(successes(ranks)) == 200


def test_a_rank_that_has_joined_is_not_waited_for(process_set: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = process_set.whole(3, proposals=True)

    def script(rank: Rank) -> None:
        for joins in range(3):
            for turn in range(10 if rank.worker.index == joins else 60):
                array = ones()
                rank.allreduce("x", array).wait()
                assert array[0] == (3 if turn < 10 else 2)
            rank.submit(JOIN).wait()

    on_every_rank(ranks, script)


def test_threads_that_wait_for_small_and_large_ones_everywhere(process_set: Set) -> None:
    """In an order of its own on each rank."""
    ranks = process_set.whole(3, proposals=True)

    def script(rank: Rank) -> None:
        def one(number: int) -> None:
            chance = random.Random(number)  # the same on all ranks
            pauses = random.Random(10 * number + rank.worker.index)
            for turn in range(60):
                length = chance.choice([1, 10, 10, 10, MEDIUM])
                array = ones(number + turn, length)
                if pauses.random() < 0.1:
                    time.sleep(pauses.random() * 0.02)  # shorter or longer than others wait for a proposal
                handle = rank.allreduce(f"x{number}", array)
                if pauses.random() < 0.2:
                    handle.leave_to_worker()
                handle.wait()
                assert array[0] == array[-1] == 3 * (number + turn)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
            assert not thread.is_alive()

    on_every_rank(ranks, script)
    assert [rank.watch.reports for rank in ranks] == [[]] * 3


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.003, 0.01])
def test_an_abort_during_a_try(process_set: Set, seconds: float) -> None:
    """Before the proposal, while it is open, or when its outcome is not known any more."""
    ranks = process_set.whole(2, proposals=True)
    handle, array = failing(ranks[1])
    proposal = threading.Thread(target=ranks[1].worker.drive, args=(handle,))
    proposal.start()
    time.sleep(seconds)
    ranks[1].worker.abort(HorovodInternalError("rank 0 failed"))
    proposal.join(SECONDS)
    assert not proposal.is_alive()
    assert error_of(handle) == "rank 0 failed"
    assert ranks[1].worker.join(SOON)
    assert array() is None, "what failed still has its tensor"


def test_a_failure_inside_a_try_is_the_workers(process_set: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = process_set.whole(2, proposals=True)
    real = Proposals.propose

    def fail(proposals: Proposals, *arguments: Any) -> int:
        if proposals.leads:
            raise ZeroDivisionError("oh")
        return real(proposals, *arguments)

    def script(rank: Rank) -> None:
        try:
            for turn in range(1000):
                if turn == 20 and rank is first:
                    monkeypatch.setattr(Proposals, "propose", fail)
                rank.allreduce("x", ones()).wait()
        except HorovodInternalError as error:
            assert str(error) == "the failure"

    failure = abort_when_reported([first, second], "the failure")
    on_every_rank([first, second], script)
    failure.join(SECONDS)
    assert first.watch.reports[0][1] == "its worker thread failed: ZeroDivisionError('oh')"


def test_stalls_are_reported_while_one_waits_for_a_try(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    for waiting in range(2):
        ranks = process_set.whole(2, proposals=True, stall_warning_time=timedelta(seconds=0.3))
        for _ in range(10):
            on_every_rank(ranks, lambda rank: rank.allreduce("x", ones()).wait())
        with caplog.at_level(logging.WARNING, "horovod"):
            alone = ranks[waiting].allreduce("alone", ones())
            thread = threading.Thread(target=alone.wait)
            thread.start()
            wait_until(lambda: "alone" in caplog.text, "the report")
        wait(ranks[1 - waiting].allreduce("alone", ones()))
        thread.join(SECONDS)
        caplog.clear()


def test_a_timeline_sees_everything(process_set: Set) -> None:
    timeline = NotingTimeline()
    ranks = process_set.whole(2, proposals=True)
    ranks[0].worker.role.observer.timeline = timeline

    def script(rank: Rank) -> None:
        for _ in range(30):
            rank.allreduce("x", ones()).wait()

    on_every_rank(ranks, script)
    assert successes(ranks) == []
    assert timeline.calls.count("begin") == 30


# One worker thread, its peer played by the test


def definition(request: Request, identifier: int = 0) -> Definition:
    return Definition(identifier, request)


def test_what_a_member_gave_up_counts_as_announced(process_set: Set) -> None:
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(0, 2, proposals=leader)
    request = allreduce_request("x", (4,))
    number = propose(member, b"anything", [])
    peers[1].say(Announce([definition(request)], number))
    handle = rank.submit(request, ones())
    handle.wait(SECONDS)
    assert member.over(number) and not member.succeeded()
    assert [[decision.name for decision in batch] for batch in peers[1].ordered()] == [["x"]]


@pytest.mark.parametrize("length", [4, MEDIUM])
def test_a_member_that_gave_up_what_succeeds_then_is_told_at_once(process_set: Set, length: int) -> None:
    """Before the leader enters the engine, where it waits for the member. What the member says later does not count."""
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(0, 2, proposals=leader, start=False)
    heard: list[object] = []
    rank.communicator.before = lambda: heard.append(decode_from_coordinator(peers[1].hear()))
    request = allreduce_request("x", (length,))
    number = propose(member, request.identity, [ones()] if length == 4 else [])
    assert not member.stop_waiting(number)
    handle = rank.submit(request, ones(length=length))
    rank.worker.drive(handle)
    assert handle.done()
    rank.worker.start()
    assert (heard or [decode_from_coordinator(peers[1].hear())]) == [Succeeded(number)]
    rank.communicator.before = lambda: None
    peers[1].say(Announce([definition(request), definition(allreduce_request("y", (4,)), 1)], number))
    rank.submit(allreduce_request("y", (4,)), ones()).wait(SECONDS)  # the rest of what it said counts
    assert [[decision.name for decision in batch] for batch in peers[1].ordered()] == [["y"]]
    assert rank.worker.role.incomplete() == []  # type: ignore[attr-defined]  # the coordinator
    peers[1].say(Announce([0]))  # x, as it was defined
    rank.submit(request, ones(length=length)).wait(SECONDS)
    assert rank.watch.reports == []


def gave_up(process_set: Set, array: Array) -> tuple[Proposals, Rank, Peer, Handle]:
    """The leader's proposals, and a member that has announced what it gave up; its worker thread does not run yet."""
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(1, 2, proposals=member, start=False)
    handle = rank.allreduce("x", array)
    rank.worker.drive(handle)  # in vain: nobody is there
    message = decode_from_member(peers[0].hear())
    assert isinstance(message, Announce) and message.proposal == 1
    return leader, rank, peers[0], handle


@pytest.mark.parametrize("length", [4, MEDIUM])
def test_a_member_learns_that_what_it_gave_up_has_succeeded(process_set: Set, length: int) -> None:
    array = ones(1, length)
    leader, rank, peer, handle = gave_up(process_set, array)
    propose(leader, b"", [ones(2)] if length == 4 else [])
    assert leader.decide(True) == [1]
    rank.worker.start()
    peer.say(Succeeded(1))
    handle.wait(SECONDS)
    if length == 4:
        assert array.tolist() == [3.0] * 4
    assert rank.communicator.batches == [1] * (length == MEDIUM)
    assert not rank.worker.pending()


def test_several_requests_of_a_proposal_that_was_given_up(process_set: Set) -> None:
    """The announcement says how many they are: none counts if the proposal has succeeded."""
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(1, 2, proposals=member, start=False)
    arrays = [ones(1), ones(2)]
    handles = [
        rank.submit(allreduce_request(name, (4,)), x, awaited=True) for name, x in zip("xy", arrays, strict=True)
    ]
    rank.worker.drive(handles[1])
    message = decode_from_member(peers[0].hear())
    assert isinstance(message, Announce) and (message.proposal, message.proposed, len(message.items)) == (1, 2, 2)
    leader.contribute([ones(10)], 0)
    leader.contribute([ones(20)], 16)
    leader.propose(b"")
    assert leader.decide(True) == [1]
    rank.worker.start()
    peers[0].say(Succeeded(1))
    for handle, array, total in zip(handles, arrays, (11, 22), strict=True):
        handle.wait(SECONDS)
        assert array.tolist() == [total] * 4
    assert not rank.worker.pending()


def test_a_coordinator_counts_nothing_of_a_proposal_that_has_succeeded(process_set: Set) -> None:
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(0, 2, proposals=leader, start=False)
    requests = [allreduce_request(name, (4,)) for name in "xyz"]
    member.contribute([ones()], 0)
    member.contribute([ones()], 16)
    number = member.propose(b"\x02" + requests[0].identity + requests[1].identity)
    assert not member.stop_waiting(number)
    handles = [rank.submit(request, ones(), awaited=True) for request in requests[:2]]
    rank.worker.drive(handles[1])
    assert all(handle.done() for handle in handles)
    assert decode_from_coordinator(peers[1].hear()) == Succeeded(number)
    rank.worker.start()
    items = [definition(request, identifier) for identifier, request in enumerate(requests)]
    peers[1].say(Announce(items, number, proposed=2))
    rank.submit(requests[2], ones()).wait(SECONDS)
    assert [[decision.name for decision in batch] for batch in peers[1].ordered()] == [["z"]]
    assert rank.worker.role.incomplete() == []  # type: ignore[attr-defined]  # the coordinator
    assert rank.watch.reports == []


@pytest.mark.parametrize("succeeded", [True, False])
def test_the_end_comes_right_after_the_word_on_what_was_given_up(process_set: Set, succeeded: bool) -> None:
    """The coordinator is done, leaves, and reads no more."""
    array = ones(1)
    leader, rank, peer, handle = gave_up(process_set, array)
    propose(leader, b"", [ones(2)])
    if leader.decide(succeeded):
        peer.say(Succeeded(1))
    peer.say(Stop(0, "it left"))
    rank.worker.start()
    if succeeded:
        handle.wait(SECONDS)
        assert array.tolist() == [3.0] * 4
    else:
        with pytest.raises(HorovodInternalError, match="it left while rank 1 waited for 'x'"):
            handle.wait(SECONDS)
    wait_until(lambda: bool(rank.stopped), "the end")
    assert [interrupted for _, _, interrupted in rank.stopped] == [not succeeded]


def test_a_member_that_saw_the_success_itself_may_be_told_as_well(process_set: Set) -> None:
    leader, rank, peer, handle = gave_up(process_set, ones(1))
    propose(leader, b"", [ones(2)])
    leader.decide(True)
    rank.worker.start()
    for _ in range(2):
        peer.say(Succeeded(1))
    handle.wait(SECONDS)
    peer.say(Stop(0, "it left"))
    wait_until(lambda: bool(rank.stopped), "the end")
    assert rank.watch.reports == []


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_member_is_told_of_a_success_that_was_not(process_set: Set, fast_path: bool) -> None:
    _, member = process_set.proposals_of(2)
    rank, peers = process_set.part(1, 2, proposals=member if fast_path else None)
    peers[0].say(Succeeded(1))
    wait_until(lambda: bool(rank.watch.reports), "the report")
    assert "it broke the protocol" in rank.watch.reports[0][1]


def test_a_member_is_told_of_the_success_of_what_has_failed(process_set: Set) -> None:
    leader, rank, peer, _ = gave_up(process_set, ones(1))
    propose(leader, b"", [])
    leader.decide(False)
    rank.worker.start()
    peer.say(Succeeded(1))
    wait_until(lambda: bool(rank.watch.reports), "the report")
    assert "it broke the protocol" in rank.watch.reports[0][1]


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_member_speaks_of_a_try_that_never_was(process_set: Set, fast_path: bool) -> None:
    leader, _ = process_set.proposals_of(2)
    rank, peers = process_set.part(0, 2, proposals=leader if fast_path else None)
    peers[1].say(Announce([definition(allreduce_request("x"))], 7))
    wait_until(lambda: bool(rank.watch.reports), "the report")
    assert "it broke the protocol" in rank.watch.reports[0][1]


def test_a_member_whose_try_was_ended_announces_as_if_nothing_had_been(process_set: Set) -> None:
    leader, member = process_set.proposals_of(2)
    rank, peers = process_set.part(1, 2, proposals=member)
    handle = rank.allreduce("x", ones())
    thread = threading.Thread(target=handle.wait)
    thread.start()
    wait_until(lambda: leader.await_proposal(1, 1, 1, 0) or peers[0].channel.receive(), "a proposal or a message")
    leader.shut()
    peers[0].say(Order([[Decision(-1, "x", Operation.ALLREDUCE)]]))
    thread.join(SECONDS)
    assert handle.done()
    leader.reopen()
    rank.allreduce("x", ones())
