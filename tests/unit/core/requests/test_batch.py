"""What a worker thread does with a batch: the arithmetic of a group of one, and the right calls for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.base import Communicator
from horovod.comm.datatypes import Array, DataType, data_type_of
from horovod.comm.reduction import ReduceOp, can_fold, neutral
from horovod.comm.single import SingleCommunicator
from horovod.core.errors import MismatchError
from horovod.core.negotiation.messages import Decision, Operation, Request, TensorSpec
from horovod.core.requests.batch import Entry, execute, shard_rows
from horovod.core.requests.handle import Handle


def entry_of(
    operation: Operation,
    arrays: Sequence[Array],
    outputs: Sequence[Array] = (),
    allocate: Callable[[int, int], Array] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    **fields: Any,
) -> Entry:
    shapes = shapes or [array.shape for array in arrays]
    specs = tuple(
        TensorSpec(f"t{number}", data_type_of(array), shape)
        for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True))
    )
    request = Request(operation, "t", specs, **fields)
    return Entry(request, [array.reshape(-1) for array in arrays], outputs, allocate, Handle(), 0.0)


def decision_of(entry: Entry, **fields: Any) -> Decision:
    return Decision(-1, entry.request.name, entry.request.operation, **fields)


def run(*entries: Entry, **fields: Any) -> None:
    execute(SingleCommunicator(), [0], [(decision_of(entry, **fields), entry) for entry in entries])


class Recording(Communicator):
    """A rank of a larger group that only notes what it is asked to do."""

    name = "recording"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[Any, ...]] = []

    def allreduce(self, inputs: Any, outputs: Any, op: Any, prescale: float, postscale: float) -> None:
        self.calls.append(("allreduce", [array.copy() for array in inputs], op, prescale, postscale))

    def allgather(self, inputs: Any, outputs: Any, counts: Any) -> None:
        self.calls.append(("allgather", [array.copy() for array in inputs], [a.size for a in outputs], counts))

    def broadcast(self, vectors: Any, root: int) -> None:
        self.calls += [("broadcast", array.copy(), root) for array in vectors]

    def alltoall(self, source: Any, target: Any, *counts: Any) -> None:
        self.calls.append(("alltoall", source[0].copy(), target[0].size, *counts))

    def reducescatter(self, inputs: Any, outputs: Any, counts: Any, op: Any, prescale: float, postscale: float) -> None:
        self.calls.append(("reducescatter", [array.copy() for array in inputs], counts, op, prescale, postscale))

    def barrier(self) -> None:
        self.calls.append(("barrier",))

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rows", "size", "shares"),
    [(6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_how_rows_are_dealt(rows: int, size: int, shares: list[int]) -> None:
    assert shard_rows(rows, size) == shares


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_all_rows_are_dealt_evenly_the_first_ranks_getting_more(rows: int, size: int) -> None:
    shares = shard_rows(rows, size)
    assert len(shares) == size
    assert sum(shares) == rows
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_an_allreduce_alone_only_scales(op: ReduceOp) -> None:
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run(entry_of(Operation.ALLREDUCE, [source], [target], reduce_op=op, prescale=0.5, postscale=4.0))
    np.testing.assert_array_equal(target, source * 2)


def test_an_allreduce_in_place() -> None:
    array = np.arange(4, dtype=np.float64)
    entry = entry_of(Operation.ALLREDUCE, [array], reduce_op=ReduceOp.SUM, postscale=3.0)
    entry.outputs = entry.inputs
    run(entry)
    np.testing.assert_array_equal(array, [0, 3, 6, 9])


def test_a_group_of_mixed_types_is_reduced_type_by_type() -> None:
    arrays = [np.full(2, 1, np.float32), np.full(3, 2, np.float64), np.full(1, 3, np.float32), np.full(1, 4, np.int32)]
    outputs = [np.zeros_like(array) for array in arrays]
    run(entry_of(Operation.ALLREDUCE, arrays, outputs, reduce_op=ReduceOp.SUM))
    for array, output in zip(arrays, outputs, strict=True):
        np.testing.assert_array_equal(array, output)


def test_average_is_a_sum_divided_by_the_size_of_the_group() -> None:
    communicator = Recording(1, 4)
    entry = entry_of(Operation.ALLREDUCE, [np.ones(2, np.float32)], [np.ones(2, np.float32)], postscale=2.0)
    execute(communicator, [0, 1, 2, 3], [(decision_of(entry), entry)])
    ((_, _, op, prescale, postscale),) = communicator.calls
    assert (op, prescale, postscale) == (ReduceOp.SUM, 1.0, 0.5)


def test_a_joined_rank_takes_part_in_an_allreduce_with_zeros() -> None:
    communicator = Recording(0, 2)
    entry = entry_of(Operation.ALLREDUCE, [np.ones(2, np.float32)], [np.ones(2, np.float32)])
    specs = (TensorSpec("x", DataType.FLOAT32, (2, 2)), TensorSpec("y", DataType.INT32, ()))
    absent = Request(Operation.ALLREDUCE, "x", specs)
    execute(
        communicator,
        [0, 1],
        [(decision_of(entry), entry), (Decision(-1, "x", Operation.ALLREDUCE, template=absent), None)],
    )
    floats, integers = communicator.calls
    assert [array.tolist() for array in floats[1]] == [[1, 1], [0, 0, 0, 0]]
    assert [array.tolist() for array in integers[1]] == [[0]]
    assert integers[1][0].dtype == np.int32
    assert floats[2:] == integers[2:] == (ReduceOp.SUM, 1.0, 0.5)


@pytest.mark.parametrize("data_type", DataType)
@pytest.mark.parametrize(
    "op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.ADASUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
)
def test_what_a_joined_rank_contributes_changes_nothing(op: ReduceOp, data_type: DataType) -> None:
    if not can_fold(op, data_type):
        return  # it is refused before
    contribution = np.full(1, neutral(op, data_type.numpy), data_type.numpy)
    limits = np.array([0, 1], data_type.numpy)
    if data_type.numpy.kind in "iu":
        limits = np.array([np.iinfo(data_type.numpy).min, 3, np.iinfo(data_type.numpy).max], data_type.numpy)
    elif data_type is not DataType.BOOL:
        limits = np.array([-np.inf, -2.5, 0.0, 7.0, np.inf], data_type.numpy)
    fold: Any = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)
    assert fold(limits, contribution).tobytes() == limits.tobytes()


@pytest.mark.parametrize(
    ("op", "contribution"), [(ReduceOp.MAX, -np.inf), (ReduceOp.MIN, np.inf), (ReduceOp.PRODUCT, 1.0)]
)
def test_where_some_joined_the_others_scale_before_they_contribute(op: ReduceOp, contribution: float) -> None:
    communicator = Recording(0, 2)
    spec = TensorSpec("x", DataType.FLOAT32, (3,))
    absent = Request(Operation.ALLREDUCE, "x", (spec,), reduce_op=op, prescale=-2.0)
    source = np.ones(2, np.float32)
    entry = entry_of(Operation.ALLREDUCE, [source], [np.zeros(2, np.float32)], reduce_op=op, prescale=-2.0)
    execute(
        communicator,
        [0, 1],
        [
            (Decision(-1, "x", Operation.ALLREDUCE, template=absent), None),
            (decision_of(entry, template=entry.request), entry),
        ],
    )
    ((_, (joined, own), found, prescale, postscale),) = communicator.calls
    assert (found, prescale, postscale) == (op, 1.0, 1.0)
    assert joined.tolist() == [contribution] * 3
    assert own.tolist() == [-2.0, -2.0]
    assert source.tolist() == [1.0, 1.0]


def test_a_joined_rank_takes_part_without_rows() -> None:
    communicator = Recording(1, 3)
    spec = TensorSpec("x", DataType.INT32, (5, 2))
    gathered = Decision(
        -1, "x", Operation.ALLGATHER, rows=((5, 0, 1),), template=Request(Operation.ALLGATHER, "x", (spec,))
    )
    execute(communicator, [0, 1, 2], [(gathered, None)])
    sent = Decision(-1, "x", Operation.BROADCAST, template=Request(Operation.BROADCAST, "x", (spec,), root=2))
    execute(communicator, [0, 1, 2], [(sent, None)])
    exchanged = Decision(
        -1,
        "x",
        Operation.ALLTOALL,
        received=(0, 0, 0),
        longest=4,
        template=Request(Operation.ALLTOALL, "x", (spec,), splits=(4, 0, 1)),
    )
    execute(communicator, [0, 1, 2], [(exchanged, None)])
    allgather, broadcast, alltoall = communicator.calls
    assert [array.size for array in allgather[1]] == [0] and allgather[2:] == ([12], [[10, 0, 2]])
    assert (broadcast[1].size, broadcast[1].dtype, broadcast[2]) == (10, np.int32, 2)
    assert (alltoall[1].size, alltoall[2:]) == (0, (0, [0, 0, 0], [0, 0, 0], 8))


def test_an_allgather_alone_copies_into_what_it_allocates() -> None:
    made: dict[int, Array] = {}

    def allocate(index: int, rows: int) -> Array:
        made[index] = np.zeros((rows, 3) if index == 0 else rows, np.float32)
        return made[index].reshape(-1)

    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float32)]
    entry = entry_of(Operation.ALLGATHER, arrays, allocate=allocate)
    run(entry, rows=((2,), (4,)))
    np.testing.assert_array_equal(made[0], arrays[0])
    np.testing.assert_array_equal(made[1], arrays[1])


def test_an_allgather_asks_for_each_ranks_elements() -> None:
    communicator = Recording(1, 3)
    entry = entry_of(
        Operation.ALLGATHER,
        [np.ones((2, 5), np.float32), np.ones((0, 2), np.float16)],
        allocate=lambda index, rows: np.zeros(rows * (5, 2)[index], (np.float32, np.float16)[index]),
    )
    execute(communicator, [0, 1, 2], [(decision_of(entry, rows=((4, 2, 0), (1, 0, 3))), entry)])
    assert [call[2:] for call in communicator.calls] == [([30], [[20, 10, 0]]), ([8], [[2, 0, 6]])]


def test_a_broadcast_alone_leaves_everything_as_it_is() -> None:
    array = np.arange(3, dtype=np.int32)
    run(entry_of(Operation.BROADCAST, [array], [array], root=0))
    assert array.tolist() == [0, 1, 2]


def test_a_broadcasts_root_is_found_among_the_groups_ranks() -> None:
    communicator = Recording(0, 3)
    arrays = [np.ones(1, np.float32), np.ones(2, np.float32)]
    entry = entry_of(Operation.BROADCAST, arrays, arrays, root=9)
    execute(communicator, [4, 7, 9], [(decision_of(entry), entry)])
    assert [(call[1].size, call[2]) for call in communicator.calls] == [(1, 2), (2, 2)]


def test_an_alltoall_alone_keeps_its_own_rows_and_says_how_many() -> None:
    made: list[Array] = []

    def allocate(index: int, rows: int) -> Array:
        made.append(np.zeros((rows, 2), np.float32))
        return made[0].reshape(-1)

    source = np.arange(8, dtype=np.float32).reshape(4, 2)
    entry = entry_of(Operation.ALLTOALL, [source], allocate=allocate, splits=(3,))
    run(entry, received=(3,), longest=3)
    np.testing.assert_array_equal(made[0], source[:3])
    assert entry.handle.result == [3]


def test_an_alltoall_receives_its_column_of_the_splits() -> None:
    communicator = Recording(1, 3)
    entry = entry_of(
        Operation.ALLTOALL,
        [np.ones((6, 2), np.float32)],
        allocate=lambda index, rows: np.zeros(rows * 2, np.float32),
        splits=(1, 2, 3),
    )
    execute(communicator, [0, 1, 2], [(decision_of(entry, received=(4, 2, 0), longest=9), entry)])
    ((_, _, *counts),) = communicator.calls
    assert counts == [12, [2, 4, 6], [8, 4, 0], 18]
    assert entry.handle.result == [4, 2, 0]


def test_outputs_of_other_sizes_than_what_an_alltoall_brings_fail_on_this_rank_alone() -> None:
    communicator, outputs = Recording(1, 3), [np.zeros(2, np.float32), np.zeros(3, np.float32), np.zeros(1, np.float32)]
    for received, error in (
        ((1, 1, 2), "rank 0 of the group sent 1 elements, and the output has room for 2"),
        ((2, 3, 1), ""),
    ):
        entry = entry_of(
            Operation.ALLTOALL, [np.ones(6, np.float32)], allocate=lambda index, rows: outputs, splits=(1, 2, 3)
        )
        execute(communicator, [0, 1, 2], [(decision_of(entry, received=received, longest=3), entry)])
        assert error in str(entry.error)
        assert isinstance(entry.error, MismatchError) == bool(error)
        assert communicator.calls[-1][-2] == list(received)
        assert communicator.calls[-1][2] == (sum(received) if error else 2)  # the size of the first vector


def test_a_reducescatter_alone_keeps_everything() -> None:
    source, target = np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros(6, np.float32)
    run(entry_of(Operation.REDUCESCATTER, [source], [target], prescale=2.0))
    np.testing.assert_array_equal(target, np.arange(6) * 2)


def test_a_reducescatter_deals_rows_not_elements() -> None:
    communicator = Recording(0, 2)
    entry = entry_of(Operation.REDUCESCATTER, [np.ones((3, 4), np.float32)], [np.zeros(8, np.float32)])
    execute(communicator, [0, 1], [(decision_of(entry), entry)])
    ((_, _, counts, op, prescale, postscale),) = communicator.calls
    assert (counts, op, prescale, postscale) == ([[8, 4]], ReduceOp.SUM, 1.0, 0.5)


def test_a_barrier_waits_even_for_a_rank_that_has_joined() -> None:
    communicator = Recording(0, 2)
    execute(communicator, [0, 1], [(Decision(-1, "b", Operation.BARRIER), None)])
    assert communicator.calls == [("barrier",)]


def test_a_join_tells_who_was_last_and_moves_nothing() -> None:
    communicator = Recording(0, 2)
    entry = Entry(Request(Operation.JOIN, "j"), [], [], None, Handle(), 0.0)
    execute(communicator, [0, 1], [(decision_of(entry, last_joined=1), entry)])
    assert entry.handle.result == 1
    assert communicator.calls == []


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
def test_tensors_of_one_element_and_of_none(shape: tuple[int, ...]) -> None:
    source = np.ones(shape, np.float32)
    target = np.zeros(source.size, np.float32)
    run(entry_of(Operation.ALLREDUCE, [source], [target], shapes=[shape]))
    np.testing.assert_array_equal(target, source.reshape(-1))
