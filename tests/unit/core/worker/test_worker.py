"""Worker threads of one process set inside this process: real threads, real messages over socket pairs, a real engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Operation,
    Request,
    TensorSpec,
)
from unit.core.workers import (
    JOIN,
    Rank,
    Set,
    error_of,
    on_every_rank,
    ones,
    wait,
)


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


def test_a_set_of_one_rank_works(process_set: Set) -> None:
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


def test_a_mismatch_fails_on_all_ranks_and_other_requests_do_not(process_set: Set) -> None:
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


def test_a_name_in_flight_cannot_be_submitted_again(process_set: Set) -> None:
    first, second = process_set.whole(2)
    handle = first.allreduce("x", ones())
    with pytest.raises(ValueError, match=r"same name as another tensor that is currently being processed.*'x'"):
        first.allreduce("x", ones())
    wait(second.allreduce("x", ones()), handle)
    wait(first.allreduce("x", ones()), second.allreduce("x", ones()))
