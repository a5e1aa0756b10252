from __future__ import annotations

import gc
import weakref
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm import reduction
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import OF_BITS, ReduceOp, Workspace, can_fold, can_scale, left_leaves, reduce_into, scale
from rank_tree import in_tree

FOLD = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
workspace = Workspace()


def bits(array: Array) -> bytes:
    return array.tobytes()


def test_operations_have_the_public_values_and_names() -> None:
    assert {op.label: int(op) for op in ReduceOp if op not in OF_BITS} == {
        "Average": 0,
        "Sum": 1,
        "Adasum": 2,
        "Min": 3,
        "Max": 4,
        "Product": 5,
    }


wholes = st.integers(-(2**30), 2**30)


@given(st.lists(st.lists(wholes, min_size=3, max_size=3), min_size=1, max_size=6), st.sampled_from(list(FOLD)))
def test_integers(rows: list[list[int]], op: ReduceOp) -> None:
    contributions = [np.array(row, np.int64) for row in rows]
    target = np.empty(3, np.int64)
    reduce_into(target, contributions, op, 1.0, 1.0, workspace)
    assert bits(target) == bits(reduce(FOLD[op], contributions))


numbers = st.floats(width=32, allow_nan=False)


@given(
    st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=14),
    st.sampled_from([op for op in FOLD if op not in OF_BITS]),
    st.sampled_from([1.0, 0.5, 0.3]),
    st.sampled_from([1.0, 1 / 3]),
    st.integers(0, 14),
)
def test_floats_combine_in_the_tree(
    rows: list[list[float]], op: ReduceOp, prescale: float, postscale: float, aliased: int
) -> None:
    """Also when the result goes over any one of the contributions; the others stay as they are."""
    contributions = [np.array(row, np.float32) for row in rows]
    copies = [row.copy() for row in contributions]
    target = contributions[aliased] if aliased < len(contributions) else np.empty(5, np.float32)
    with np.errstate(all="ignore"):
        expected = in_tree(FOLD[op], [row * np.float32(prescale) if prescale != 1.0 else row for row in copies])
        expected = expected * np.float32(postscale) if postscale != 1.0 else expected
        reduce_into(target, contributions, op, prescale, postscale, workspace)
    np.testing.assert_array_equal(target, expected)
    assert (np.signbit(target) == np.signbit(expected))[~np.isnan(expected)].all()
    for index, (row, copy) in enumerate(zip(contributions, copies, strict=True)):
        assert index == aliased or bits(row) == bits(copy)


def test_the_order_matters_and_is_that_of_the_ranks() -> None:
    contributions = [np.array([value], np.float32) for value in (1e8, -1e8, 1.0)]
    target = np.empty(1, np.float32)
    reduce_into(target, contributions, ReduceOp.SUM, 1.0, 1.0, workspace)
    assert target[0] == 1.0
    reduce_into(target, contributions[::-1], ReduceOp.SUM, 1.0, 1.0, workspace)
    assert target[0] == 0.0


def test_ranks_of_equal_hosts_are_in_one_tree_with_the_hosts() -> None:
    """A tree on each host and one over the hosts are one tree if each host has the same power of two of ranks."""

    def pair(left: object, right: object) -> object:
        return left, right

    for hosts in range(1, 40):
        for each in (1, 2, 4, 8):
            of_hosts = [in_tree(pair, range(first, first + each)) for first in range(0, hosts * each, each)]
            assert in_tree(pair, of_hosts) == in_tree(pair, range(hosts * each))


def test_contributions_are_free_when_they_are_reduced() -> None:
    """Not only after a collection of garbage: they may be views of memory that is to be unmapped."""
    contributions = [np.ones(5, np.float16) for _ in range(5)]
    left = [weakref.ref(each) for each in contributions]
    gc.disable()
    try:
        reduce_into(np.empty(5, np.float16), contributions, ReduceOp.SUM, 0.5, 1.0, workspace)
        contributions.clear()
        assert not [each for each in left if each() is not None]
    finally:
        gc.enable()


def test_the_left_child_of_the_root() -> None:
    for leaves in range(2, 300):
        left, right = in_tree(lambda one, other: (sum(one), sum(other)), [(1,)] * leaves)  # type: ignore[arg-type]
        assert (left, right) == (left_leaves(leaves), leaves - left_leaves(leaves))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_accumulate_in_32(dtype: type) -> None:
    """1 and many contributions too small to change it one by one."""
    target = np.empty(1, dtype)
    small = float(ml_dtypes.finfo(dtype).eps) / 4
    contributions = [np.array([1.0], dtype)] + [np.array([small], dtype)] * 8
    reduce_into(target, contributions, ReduceOp.SUM, 1.0, 1.0, workspace)
    assert float(target[0]) == 1 + 8 * small


def test_a_float16_sum_may_exceed_its_range_on_the_way_to_an_average_within() -> None:
    target = np.empty(1, np.float16)
    reduce_into(target, [np.array([65504], np.float16)] * 2, ReduceOp.SUM, 1.0, 0.5, workspace)
    assert target[0] == 65504


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_round_once_to_nearest_even(dtype: type) -> None:
    eps = float(ml_dtypes.finfo(dtype).eps)
    target = np.empty(2, dtype)
    contributions = [np.array([1.0, 1.0 + eps], dtype), np.array([eps / 2, eps / 2], dtype)]
    reduce_into(target, contributions, ReduceOp.SUM, 1.0, 1.0, workspace)
    assert target.astype(float).tolist() == [1.0, 1.0 + 2 * eps]


INTEGERS = [each for each in DataType if np.issubdtype(each.numpy, np.integer)]


@pytest.mark.parametrize("data_type", INTEGERS)
def test_integer_scaling_truncates_towards_zero(data_type: DataType) -> None:
    array = np.array([7, 1, 100], data_type.numpy)
    scale(array, 1 / 3)
    assert array.tolist() == [2, 0, 33]
    if np.issubdtype(data_type.numpy, np.signedinteger):
        array = np.array([-7, -1, -100], data_type.numpy)
        scale(array, 1 / 3)
        assert array.tolist() == [-2, 0, -33]


@given(st.sampled_from(INTEGERS), st.integers(2, 5000), st.integers())
def test_integers_are_divided_by_the_number_of_ranks(data_type: DataType, ranks: int, number: int) -> None:
    """Multiplied by 1/49, 1/98, 1/103, ... what 49 ranks hold alike would be one too small."""
    limits = np.iinfo(data_type.numpy)
    for each in (number, number * ranks):
        value = limits.min + (each - limits.min) % (limits.max - limits.min + 1)
        array = np.array([value, 0], data_type.numpy)
        scale(array, 1 / ranks)
        assert array.tolist() == [abs(value) // ranks * (1 if value > 0 else -1), 0]


@pytest.mark.parametrize("factor", [0.0, 1e-300, -0.5, 0.75, 2.0, 5e-324])
def test_integers_are_multiplied_by_other_factors(factor: float) -> None:
    array = np.array([1000, -1000], np.int64)
    scale(array, factor)
    assert array.tolist() == [int(1000 * factor), int(-1000 * factor)]


def test_integer_sums_wrap_around() -> None:
    target = np.empty(1, np.int8)
    reduce_into(target, [np.array([127], np.int8), np.array([1], np.int8)], ReduceOp.SUM, 1.0, 1.0, workspace)
    assert target[0] == -128


def test_logical_values() -> None:
    rows = [np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)]
    results = {}
    for op in FOLD:
        target = np.empty(4, bool)
        reduce_into(target, rows, op, 1.0, 1.0, workspace)
        results[op.label] = target.astype(int).tolist()
    either, both = [0, 1, 1, 1], [0, 0, 0, 1]
    alike = {"Sum": either, "Max": either, "Min": both, "Product": both}
    assert results == {**alike, "Bor": either, "Band": both, "Bxor": [0, 1, 1, 0]}
    assert [data_type for data_type in DataType if not can_scale(data_type)] == [DataType.BOOL]


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_pairs_of_reals(dtype: type) -> None:
    rows = [np.array([1 + 2j, complex(np.inf, 1), -3j], dtype), np.array([3 - 4j, 1, 1j], dtype)]
    target = np.empty(3, dtype)
    reduce_into(target, rows, ReduceOp.SUM, 0.5, 3.0, workspace)
    assert target.tolist() == [6 - 3j, complex(np.inf, 1.5), -3j]  # no NaN beside what is infinite
    for op in ReduceOp:
        assert can_fold(op, DataType.COMPLEX64) == (op in (ReduceOp.SUM, ReduceOp.AVERAGE))
        assert can_fold(op, DataType.FLOAT32) == (op not in OF_BITS) and can_fold(op, DataType.BOOL)


def test_a_factor_of_one_changes_no_bit() -> None:
    array = np.array([2**63 - 1], np.int64)  # not representable in float64
    scale(array, 1.0)
    assert array[0] == 2**63 - 1


@pytest.mark.parametrize("data_type", DataType)
@pytest.mark.parametrize("prescale", [1.0, 2.0])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_scratch_is_bounded_and_shared_by_all_types(data_type: DataType, prescale: float, count: int) -> None:
    """A single rank's vector is as long as its tensor."""
    if prescale != 1.0 and not can_scale(data_type):
        return
    own, length = Workspace(), (5 << 20) // data_type.itemsize + 3
    rows = [(np.arange(length) % 7).astype(data_type.numpy) for _ in range(count)]
    target = rows[-1]
    expected = reduce(np.add, rows) * target.dtype.type(prescale) if data_type is not DataType.BOOL else target.copy()
    reduce_into(target, rows, ReduceOp.SUM, prescale, 1.0, own)
    assert (target == expected).all()
    others = [np.ones(9, each.numpy) for each in DataType if can_scale(each)]
    for other in others:
        reduce_into(other, [other.copy() for _ in range(3)], ReduceOp.SUM, 2.0, 1.0, own)
        assert (other == 6).all()
    assert own.nbytes <= 8 << 20


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(DataType), st.integers(0, 300)), max_size=30))
def test_the_memory_of_a_number_is_that_of_the_longest_vector(asked: list[tuple[int, DataType, int]]) -> None:
    own, longest = Workspace(), dict.fromkeys(range(4), 0)
    for index, data_type, length in asked:
        array = own.array(index, data_type.numpy, length)
        array[:] = 1
        assert array.dtype == data_type.numpy and array.size == length
        longest[index] = max(longest[index], array.nbytes)
        assert longest[index] <= own.array(index, np.dtype(np.uint8), longest[index]).size
        assert sum(longest.values()) <= own.nbytes <= sum(longest.values()) + 15 * len(longest)


@pytest.mark.parametrize("data_type", DataType)
def test_empty_vectors(data_type: DataType) -> None:
    empty = np.empty(0, data_type.numpy)
    reduce_into(empty, [empty] * 3, ReduceOp.SUM, 1.0, 1.0, workspace)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is used for 16-bit floats, back afterwards."""
    for name in ("_widen", "_narrow", "_sum", "_mean"):
        monkeypatch.setattr(reduction, name, getattr(reduction, name))


def never(first: Array, second: Array, target: Array) -> bool:
    target[:] = 77
    return False


def test_replaced_conversions_are_used_and_change_nothing(halves: None) -> None:
    used = []

    def convert(source: Array, target: Array) -> None:
        used.append((source.dtype, target.dtype))
        target[:] = source.astype(target.dtype)

    rows = [np.linspace(-3, 3, 100).astype(np.float16), np.linspace(5, 1e-5, 100).astype(np.float16)]
    plain, replaced = np.empty(100, np.float16), np.empty(100, np.float16)
    reduce_into(plain, rows, ReduceOp.SUM, 0.5, 1 / 3, workspace)
    reduction.use_halves(convert, never, never)
    reduce_into(replaced, rows, ReduceOp.SUM, 0.5, 1 / 3, workspace)
    assert bits(plain) == bits(replaced)
    assert set(used) == {(np.dtype(np.float16), np.dtype(np.float32)), (np.dtype(np.float32), np.dtype(np.float16))}


@pytest.mark.parametrize("alias", [0, 1, 2])
def test_two_halves_combined_at_once(halves: None, alias: int) -> None:
    """A sum or a mean of two can be done in one go; one that is given up leaves no trace, in whatever memory it wrote."""
    taken = []

    def combine(name: str, done: bool, value: float) -> reduction.Combine:
        def combined(first: Array, second: Array, target: Array) -> bool:
            taken.append(name)
            target[:] = value
            return done

        return combined

    def reduced(op: ReduceOp, prescale: float, postscale: float) -> list[float]:
        rows = [np.full(3, 1, np.float16), np.full(3, 3, np.float16)]
        target = [*rows, np.empty(3, np.float16)][alias]
        reduce_into(target, rows, op, prescale, postscale, workspace)
        return target.tolist()

    reduction.use_halves(reduction._cast, combine("sum", True, 41.0), combine("mean", False, 42.0))
    assert reduced(ReduceOp.SUM, 1.0, 1.0) == [41.0] * 3
    assert taken == ["sum"]
    assert reduced(ReduceOp.SUM, 1.0, 0.5) == [2.0] * 3
    assert taken == ["sum"] if alias < 2 else ["sum", "mean"]
    assert reduced(ReduceOp.SUM, 0.5, 1.0) == [2.0] * 3
    assert reduced(ReduceOp.MAX, 1.0, 1.0) == [3.0] * 3
    assert taken == ["sum"] if alias < 2 else ["sum", "mean"]


def test_a_workspace_reuses_its_memory() -> None:
    own = Workspace()
    dtype = np.dtype(np.float32)
    first = own.array(0, dtype, 100)
    assert np.shares_memory(first, own.array(0, dtype, 10))
    assert own.array(0, dtype, 10).size == 10
    assert not np.shares_memory(first, own.array(1, dtype, 100))
    assert own.array(0, dtype, 1000).size == 1000
