"""allreduce and reducescatter: every type, shape and operation, against NumPy."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from horovod.mxnet.ops.arrays import DATA_TYPES

TYPES = [np.dtype(kind) for kind in DATA_TYPES]
SHAPES = [(1,), (5,), (3, 1, 7)]
NUMPY_SHAPES = [(), (0,), (2, 0, 3)]  # those that mx.nd does not have, but mx.np has
OPS = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """One rank's elements: small, so that every type holds sums and products of all of them."""
    return np.random.default_rng([rank, *shape]).integers(0, 4, size=shape).astype(dtype)


def arrays(rank: int, dtype: Any) -> list[Any]:
    """Of both kinds, in all shapes."""
    return [
        *(mx.nd.array(values(rank, shape, dtype), dtype=dtype) for shape in SHAPES),
        *(mx.np.array(values(rank, shape, dtype), dtype=dtype) for shape in SHAPES + NUMPY_SHAPES),
    ]


def same(found: Any, wanted: np.ndarray[Any, Any], like: Any) -> bool:
    assert type(found) is type(like) and np.dtype(found.dtype) == np.dtype(like.dtype)
    assert tuple(found.shape) == wanted.shape, (found, wanted)
    return bool(np.array_equal(found.asnumpy(), wanted.astype(found.dtype)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_type_shape_and_operation_is_reduced_as_numpy_does(job: Any, size: int) -> None:
    @mx.util.use_np_shape  # without it MXNet takes a 0 in a shape for "not known yet"
    def check() -> None:
        for dtype in TYPES:
            everybody = [arrays(rank, dtype) for rank in range(size)]
            for index, mine in enumerate(everybody[hvd.rank()]):
                stacked = np.stack([theirs[index].asnumpy() for theirs in everybody])
                before = mine.asnumpy()
                for name, combine in OPS.items():
                    op, wanted = getattr(hvd, name), combine(stacked, axis=0)
                    assert same(hvd.allreduce(mine, op=op), wanted, mine), (name, dtype, mine.shape)
                    copy = mine.copy()
                    assert hvd.allreduce_(copy, op=op) is copy
                    assert same(copy, wanted, mine), (name, dtype, mine.shape)
                assert np.array_equal(mine.asnumpy(), before)

    job(size, check)


def test_averages_and_factors_scale_the_sum_and_average_is_deprecated(job: Any) -> None:
    def check() -> None:
        own = mx.nd.array([1.5, -2.25, 1000.0]) * (hvd.rank() + 1)
        for dtype in ("float16", "float32", "float64"):
            mean = hvd.allreduce(own.astype(dtype))
            assert np.dtype(mean.dtype) == dtype
            np.testing.assert_allclose(mean.asnumpy(), [2.25, -3.375, 1500.0], rtol=1e-3)
        total = mx.nd.array([7, -7, 3, -1, 0] if hvd.rank() == 0 else [0] * 5, dtype="int32")
        for dtype in ("int8", "int32", "int64"):  # an integer's average is cut towards zero
            assert hvd.allreduce(total.astype(dtype)).asnumpy().tolist() == [3, -3, 1, 0, 0]
        scaled = hvd.allreduce(own, op=hvd.Max, prescale_factor=2.0, postscale_factor=3.0)
        assert scaled.asnumpy().tolist() == [18.0, -13.5, 12000.0]
        for factors in ({"prescale_factor": np.float32(0.5)}, {"postscale_factor": np.int64(2)}):
            found = hvd.allreduce(own, op=hvd.Sum, **factors).asnumpy() / next(iter(factors.values()))
            assert found.tolist() == [4.5, -6.75, 3000.0]
        with pytest.deprecated_call():
            assert hvd.allreduce(own, average=False).asnumpy().tolist() == [4.5, -6.75, 3000.0]
        with pytest.deprecated_call():
            assert hvd.allreduce(own, True).asnumpy().tolist() == [2.25, -3.375, 1500.0]
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(own, average=True, op=hvd.Sum)

    job(2, check)


def test_adasum_is_refused_with_an_assertion_error(job: Any) -> None:
    def check() -> None:
        x = mx.nd.ones((2,))
        for call in (hvd.allreduce, hvd.allreduce_):
            with pytest.raises(AssertionError, match="Adasum is not supported"):
                call(x, op=hvd.Adasum)
        for group in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
            with pytest.raises(AssertionError, match="Adasum is not supported"):
                group([x], op=hvd.Adasum)

    job(2, check)


def test_a_group_of_mixed_types_is_reduced_and_an_empty_one_comes_back(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()

        def group() -> list[Any]:
            return [mx.nd.array([me, 1.0]), mx.nd.array([me], dtype="int32"), mx.np.full((2, 2), me, dtype="float16")]

        mixed = hvd.grouped_allreduce(group(), name="mixed")
        assert [np.dtype(each.dtype).name for each in mixed] == ["float32", "int32", "float16"]
        assert [each.asnumpy().ravel().tolist() for each in mixed] == [[1.0, 1.0], [1], [1.0] * 4]
        own = group()
        assert hvd.grouped_allreduce_(own, op=hvd.Sum) is own
        assert [each.asnumpy().ravel().tolist() for each in own] == [[3.0, 3.0], [3], [3.0] * 4]
        empty: list[Any] = []
        for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
            assert call(empty) is empty

    job(3, check)


def test_reducescatter_gives_each_rank_its_rows_of_the_sum(job: Any) -> None:
    def check() -> None:
        me, size = hvd.rank(), hvd.size()
        for dtype in TYPES:
            for rows in (1, 4, 7):
                everybody = [values(rank, (rows, 3), dtype) for rank in range(size)]
                wanted = np.array_split(np.sum(everybody, axis=0), size)[me]
                for make in (mx.nd.array, mx.np.array):
                    mine = make(everybody[me], dtype=dtype)
                    assert same(hvd.reducescatter(mine, op=hvd.Sum), wanted, mine), (dtype, rows)
        found = hvd.reducescatter(mx.nd.ones((3, 2)) * (me + 1), prescale_factor=np.float64(2.0))
        assert found.asnumpy().tolist() == [[4.0, 4.0]]
        pair = hvd.grouped_reducescatter([mx.nd.arange(4), 2 * mx.nd.arange(4)], op=hvd.Sum, name="pair")
        mine = [[0.0, 3.0], [6.0], [9.0]][me]
        assert pair[0].asnumpy().tolist() == mine and pair[1].asnumpy().tolist() == [2 * each for each in mine]

    job(3, check)


def test_reducescatter_takes_sum_and_average_of_what_has_rows(job: Any) -> None:
    def check() -> None:
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            with pytest.raises(AssertionError, match=r"hvd\.Average or hvd\.Sum"):
                hvd.reducescatter(mx.nd.ones((2,)), op=op)
            with pytest.raises(AssertionError, match=r"hvd\.Average or hvd\.Sum"):
                hvd.grouped_reducescatter([mx.nd.ones((2,))], op=op)
        for call in (hvd.reducescatter, lambda x: hvd.grouped_reducescatter([x])):
            with pytest.raises(ValueError, match="reducescatter does not support scalar inputs"):
                call(mx.np.array(1.0))
        assert hvd.reducescatter(mx.nd.ones((1,))).shape == ((1,) if hvd.rank() == 0 else (0,))

    job(2, check)


def test_a_process_set_reduces_among_its_members_and_refuses_other_ranks(job: Any) -> None:
    def check(sets: list[Any]) -> None:
        pair, me = sets[0], hvd.rank()
        x = mx.nd.array([me + 1.0])
        if pair.included():
            assert hvd.allreduce(x, op=hvd.Sum, process_set=pair, name="x").asscalar() == 4.0
            assert hvd.allreduce_(x.copy(), process_set=pair).asscalar() == 2.0
            assert hvd.grouped_allreduce([x], op=hvd.Max, process_set=pair)[0].asscalar() == 3.0
            assert hvd.broadcast(x, 2, process_set=pair).asscalar() == 3.0
            assert hvd.allgather(x, process_set=pair).asnumpy().tolist() == [1.0, 3.0]
            assert hvd.alltoall(mx.nd.array([me, 9.0]), process_set=pair).asnumpy().tolist()[0] in (0.0, 9.0)
            assert hvd.reducescatter(mx.nd.ones((2,)), op=hvd.Sum, process_set=pair).asnumpy().tolist() == [2.0]
            with pytest.raises(ValueError, match="invalid root rank 1"):
                hvd.broadcast(x, 1, process_set=pair)
        else:
            for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                with pytest.raises(ValueError, match="Rank 1 is not a member of the provided process set") as found:
                    call(x, process_set=pair)
                assert isinstance(found.value, mx.MXNetError)
            with pytest.raises(ValueError, match="not a member"):
                hvd.broadcast_(x, 2, process_set=pair)
        assert hvd.allreduce(x, op=hvd.Sum).asscalar() == 6.0

    job(3, check, sets=[[0, 2]])
