"""Each way in which ranks can disagree gives the text that scripts know, every rank's view, and the lines of the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.agreement import MISMATCHED, describe, disagreement, list_ranks
from horovod.core.negotiation.messages import Operation, Request, TensorSpec

REDUCTIONS = [Operation.ALLREDUCE, Operation.ADASUM, Operation.REDUCESCATTER]
SAME_SHAPE = [*REDUCTIONS, Operation.BROADCAST]
ROWS = [Operation.ALLGATHER, Operation.ALLTOALL]


def make(
    operation: Operation = Operation.ALLREDUCE,
    shape: tuple[int, ...] = (2, 3),
    data_type: DataType = DataType.FLOAT32,
    name: str = "grad",
    **fields: Any,
) -> Request:
    return Request(operation, name, (TensorSpec(name, data_type, shape),), **fields)


def refusal(*requests: Request | None, ranks: Sequence[int] | None = None) -> str:
    text = disagreement(requests, ranks or range(len(requests)))
    assert text
    return text


@pytest.mark.parametrize("operation", Operation)
def test_equal_requests_agree_wherever_they_were_submitted(operation: Operation) -> None:
    first = make(operation, caller="a.py:1")
    assert disagreement([first], [0]) == ""
    assert disagreement([first, first, make(operation, caller="b.py:2")], [0, 1, 2]) == ""


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.JOIN])
def test_types(operation: Operation) -> None:
    text = refusal(make(operation), make(operation, data_type=DataType.BFLOAT16))
    assert "Mismatched data types: One rank had type float32, but another rank had type bfloat16." in text


@pytest.mark.parametrize("one", Operation)
@pytest.mark.parametrize("two", Operation)
def test_operations(one: Operation, two: Operation) -> None:
    if one is not two:
        text = refusal(make(one), make(two))
        assert f"Mismatched operations: One rank did an {one.name}, but another rank did an {two.name}." in text


@pytest.mark.parametrize("operation", SAME_SHAPE)
@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 3, 1), (6,), (2, 4)])
def test_shapes(operation: Operation, shape: tuple[int, ...]) -> None:
    text = refusal(make(operation), make(operation, shape))
    assert (
        f"Mismatched {operation.name} tensor shapes: One rank sent a tensor of shape [2, 3], "
        f"but another rank sent a tensor of shape {list(shape)}."
    ) in text


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.ADASUM, Operation.BROADCAST])
def test_a_scalar_has_a_shape_too(operation: Operation) -> None:
    assert disagreement([make(operation, ())] * 2, [0, 1]) == ""
    assert "shape [], but another rank sent a tensor of shape [1]." in refusal(
        make(operation, ()), make(operation, (1,))
    )


@pytest.mark.parametrize("operation", [*ROWS, Operation.REDUCESCATTER])
def test_scalars_where_rows_are_needed(operation: Operation) -> None:
    fragment = f"Process-set rank zero tried to {operation.name} a rank-zero tensor."
    assert fragment in refusal(make(operation, ()), make(operation, (), caller="b.py:1"))
    assert fragment in refusal(make(operation, ()), make(operation, (1,)))
    assert fragment in refusal(make(operation, (1,)), make(operation, ()))


@pytest.mark.parametrize("operation", ROWS)
def test_numbers_of_dimensions(operation: Operation) -> None:
    text = refusal(make(operation, (2, 3)), make(operation, (2, 3, 1)))
    assert "One rank sent a tensor of rank 2, but another rank sent a tensor of rank 3." in text


@pytest.mark.parametrize("operation", ROWS)
def test_dimensions_beyond_the_first(operation: Operation) -> None:
    text = refusal(make(operation, (9, 4, 5)), make(operation, (1, 4, 6)))
    assert (
        "One rank sent a tensor with dimension 2 equal to 5, but another rank sent a tensor with dimension 2 equal to 6."
    ) in text


@pytest.mark.parametrize("operation", ROWS)
def test_the_first_dimension_is_each_ranks_own(operation: Operation) -> None:
    assert disagreement([make(operation, (rows, 3)) for rows in (0, 5, 1)], range(3)) == ""


@pytest.mark.parametrize("operation", REDUCTIONS)
@pytest.mark.parametrize("fields", [{"prescale": 0.5}, {"postscale": 2.0}, {"prescale": 2.0, "postscale": 0.5}])
def test_factors(operation: Operation, fields: dict[str, float]) -> None:
    text = refusal(make(operation), make(operation, **fields))
    assert "Mismatched prescale and/or postscale factors:" in text

    for name, value in fields.items():
        assert f"{name}d by {value:g}" in text


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.REDUCESCATTER])
def test_reductions(operation: Operation) -> None:
    """A reducescatter's too: Average and Sum must not be mixed up either."""
    text = refusal(make(operation, reduce_op=ReduceOp.SUM), make(operation, reduce_op=ReduceOp.AVERAGE))
    assert "Mismatched reduction operation: One rank requested Sum, but another rank requested Average." in text


def test_compressions() -> None:
    text = refusal(make(compression="int8"), make(), make(compression="int4"))
    assert "Mismatched compression: One rank compresses with int8, but another rank compresses with none." in text
    assert "rank 2: allreduce(Average) float32 [2, 3] compressed with int4" in text


def test_roots() -> None:
    text = refusal(make(Operation.BROADCAST, root=4), make(Operation.BROADCAST, root=7), ranks=[4, 7])
    assert (
        "Mismatched BROADCAST root ranks: One rank specified root rank 4, but another rank specified root rank 7."
        in text
    )


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.JOIN])
def test_devices(operation: Operation) -> None:
    text = refusal(make(operation), make(operation, device="cuda"))
    assert f"Mismatched {operation.name} CPU/GPU device selection:" in text
    assert "cpu" in text
    assert "cuda" in text


def test_sizes_of_groups() -> None:
    spec = TensorSpec("g", DataType.FLOAT32, (1,))
    text = refusal(Request(Operation.ALLREDUCE, "g", (spec,)), Request(Operation.ALLREDUCE, "g", (spec, spec)))
    assert "Mismatched group sizes: One rank sent 1 tensors, but another rank sent 2 tensors." in text


@pytest.mark.parametrize("change", ["type", "shape"])
def test_the_tensor_of_a_group_that_differs_is_named(change: str) -> None:
    def group(data_type: DataType, shape: tuple[int, ...]) -> Request:
        specs = [TensorSpec(f"g_{number}of3", DataType.FLOAT32, (2,)) for number in (1, 2, 3)]
        specs[1] = TensorSpec("g_2of3", data_type, shape)
        return Request(Operation.ALLREDUCE, "g", tuple(specs))

    other = group(DataType.INT8, (2,)) if change == "type" else group(DataType.FLOAT32, (5,))
    text = refusal(group(DataType.FLOAT32, (2,)), other)
    assert "'g_2of3'" in text
    assert "'g_1of3'" not in text
    assert "'g_3of3'" not in text


def test_the_first_check_that_fails_is_the_one_that_is_told() -> None:
    """In the order of the public interface: type, operation, shape, factors, reduction, device."""
    one = make(reduce_op=ReduceOp.SUM)
    ladder = [
        make(Operation.BROADCAST, (9,), DataType.INT8, prescale=2.0, reduce_op=ReduceOp.MIN, device="cuda"),
        make(Operation.BROADCAST, (9,), prescale=2.0, reduce_op=ReduceOp.MIN, device="cuda"),
        make(Operation.ALLREDUCE, (9,), prescale=2.0, reduce_op=ReduceOp.MIN, device="cuda"),
        make(Operation.ALLREDUCE, prescale=2.0, reduce_op=ReduceOp.MIN, device="cuda"),
        make(Operation.ALLREDUCE, reduce_op=ReduceOp.MIN, device="cuda"),
        make(Operation.ALLREDUCE, reduce_op=ReduceOp.SUM, device="cuda"),
    ]
    starts = [refusal(one, other).split(":")[0] for other in ladder]
    assert starts == [
        "Mismatched data types",
        "Mismatched operations",
        "Mismatched ALLREDUCE tensor shapes",
        "Mismatched prescale and/or postscale factors",
        "Mismatched reduction operation",
        "Mismatched ALLREDUCE CPU/GPU device selection",
    ]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make(Operation.REDUCESCATTER), "ranks 3, 8 joined already, so their rows of the result would be lost"),
        (make(Operation.BROADCAST, root=8), "rank 8, whose tensor it is, joined already"),
        (make(Operation.ALLTOALL, splits=(1, 0, 0, 2)), "rank 8 joined already, and rank 2 sends 2 rows to it"),
    ],
    ids=["reducescatter", "broadcast", "alltoall"],
)
def test_operations_that_fail_after_ranks_have_joined(request_: Request, reason: str) -> None:
    text = refusal(request_, None, request_, None, ranks=[2, 3, 5, 8])
    operation = request_.operation.name.capitalize()
    assert f"{operation} is not supported with Join at this time: {reason}." in text
    assert "ranks 3, 8: joined" in text


@pytest.mark.parametrize(
    "request_",
    [
        make(Operation.ALLREDUCE),
        make(Operation.ADASUM),
        make(Operation.BARRIER),
        make(Operation.ALLGATHER),
        make(Operation.BROADCAST, root=5),
        make(Operation.ALLTOALL, splits=(0, 2, 3, 0)),
    ],
    ids=lambda request: request.operation.name,
)
def test_operations_that_work_after_ranks_have_joined(request_: Request) -> None:
    assert disagreement([None, request_, request_, None], [2, 5, 7, 8]) == ""


def test_a_mismatch_among_the_rest_comes_before_the_joined() -> None:
    assert "Mismatched" in refusal(make(Operation.ALLGATHER, (1, 2)), None, make(Operation.ALLGATHER, (1, 3)))


def test_all_ranks_requests_are_quoted_with_equal_ones_together() -> None:
    many = make(shape=(10,), caller="train.py:12")
    odd = make(shape=(11,), caller="train.py:40")
    text = refusal(many, many, odd, many, None, ranks=[0, 1, 2, 3, 9])
    head, *views = text.split("\n")
    assert head.endswith("Tensor 'grad', as each rank submitted it:")
    assert views == [
        "  ranks 0-1, 3: allreduce(Average) float32 [10] at train.py:12",
        "  rank 2: allreduce(Average) float32 [11] at train.py:40",
        "  rank 9: joined",
    ]


def test_ranks_are_global() -> None:
    text = refusal(make(), make(shape=(1,)), ranks=[17, 31])
    assert "rank 17: " in text
    assert "rank 31: " in text


def test_a_request_reads_well() -> None:
    assert describe(make(Operation.BROADCAST, (4,), root=3, caller="x.py:1")) == (
        "broadcast float32 [4] from root 3 at x.py:1"
    )
    assert describe(Request(Operation.BARRIER, "barrier.noname")) == "barrier"
    assert describe(Request(Operation.BARRIER, "b", device="gpu")) == "barrier on gpu"
    many = tuple(TensorSpec(str(number), DataType.INT64, (number,)) for number in range(6))
    text = describe(Request(Operation.ALLREDUCE, "g", many, reduce_op=ReduceOp.MAX))
    assert text == "allreduce(Max) int64 [0], int64 [1], int64 [2], int64 [3], ... 6 tensors"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 1, 0, 2, 9, 7, 8], "ranks 0-2, 5, 7-9"), ([4, 2], "ranks 2, 4")],
)
def test_lists_of_ranks(ranks: list[int], text: str) -> None:
    assert list_ranks(ranks) == text


@given(st.sets(st.integers(0, 50), min_size=1))
def test_no_rank_is_lost_in_a_list(ranks: set[int]) -> None:
    found: list[int] = []
    for span in list_ranks(ranks).split(" ", 1)[1].split(", "):
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(ranks)


@given(st.permutations([make(shape=(2,)), make(shape=(3,)), make(shape=(2,)), None]))
def test_a_disagreement_is_found_in_whatever_order_it_stands(requests: list[Request | None]) -> None:
    assert "Mismatched ALLREDUCE tensor shapes" in refusal(*requests)


def test_a_mismatch_of_alike_is_quoted() -> None:
    one, two = (make(alike=text) for text in ("all 3 gradients", "gradients 0-1 of 3"))
    assert disagreement([one, one], [0, 1]) == ""
    text = disagreement([one, two], [0, 1])
    assert text.startswith(f"{MISMATCHED}: One rank has all 3 gradients, but another rank has gradients 0-1 of 3.")
    assert "of all 3 gradients" in text.splitlines()[1] and one.identity != two.identity
