"""allreduce and reducescatter: every type, shape and operation, eagerly and in functions, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.tensors import DATA_TYPES

SHAPES = [(), (0,), (5,), (2, 0, 3), (3, 1, 7)]
OPS = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
MODES: list[Callable[[Any], Any]] = [lambda function: function, tf.function]


def operations(dtype: tf.DType) -> dict[str, Any]:
    """What a type can be reduced with: complex numbers have no order, and a product of pairs of reals is another number."""
    return {"Sum": np.sum} if dtype.is_complex else OPS


def values(rank: int, shape: tuple[int, ...], dtype: tf.DType) -> np.ndarray[Any, Any]:
    """One rank's elements: small, so that every type holds sums and products of all of them."""
    elements = np.random.default_rng([rank, *shape]).integers(0, 4, size=shape)
    if dtype.is_complex:
        return elements * (1 + 2j)
    return elements % 2 if dtype == tf.bool else elements


def tensor(rank: int, shape: tuple[int, ...], dtype: tf.DType) -> Any:
    return tf.cast(tf.constant(values(rank, shape, dtype)), dtype)


def same(found: Any, wanted: np.ndarray[Any, Any], dtype: tf.DType) -> bool:
    assert found.dtype == dtype and tuple(found.shape) == wanted.shape, (found, wanted)
    wanted = wanted.astype(bool) if dtype == tf.bool else wanted
    return bool(np.array_equal(tf.cast(found, tf.complex128).numpy(), wanted.astype(np.complex128)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_type_shape_and_operation_is_reduced_as_numpy_does(job: Any, size: int) -> None:
    def check() -> None:
        def reduce_all(sources: list[Any]) -> list[Any]:
            return [hvd.allreduce(each, op=getattr(hvd, name)) for each in sources for name in operations(each.dtype)]

        for mode in MODES if size == 2 else MODES[:1]:  # graphs are the same whatever the number of ranks
            reduce = mode(reduce_all)
            for dtype in DATA_TYPES:
                sources = [tensor(hvd.rank(), shape, dtype) for shape in SHAPES]
                found = iter(reduce(sources))
                for shape in SHAPES:
                    everybody = np.stack([values(rank, shape, dtype) for rank in range(size)])
                    for name, combine in operations(dtype).items():
                        assert same(next(found), combine(everybody, axis=0), dtype), (name, dtype, shape)
                for source, shape in zip(sources, SHAPES, strict=True):
                    assert same(source, values(hvd.rank(), shape, dtype), dtype)

    job(size, check)


def test_averages_factors_and_compression_keep_the_type_and_average_is_deprecated(job: Any) -> None:
    def check() -> None:
        own = tf.constant([1.5, -2.25, 1000.0]) * (hvd.rank() + 1)
        for mode in MODES:
            for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
                mean = mode(hvd.allreduce)(tf.cast(own, dtype))
                assert mean.dtype == dtype
                rtol = 1e-2 if dtype.size == 2 else 1e-6
                np.testing.assert_allclose(tf.cast(mean, tf.float64), [2.25, -3.375, 1500.0], rtol=rtol)
            total = tf.constant([7, -7, 3, -1, 0] if hvd.rank() == 0 else [0] * 5)
            for dtype in (tf.int8, tf.int32, tf.int64):  # an integer's average is cut towards zero
                assert mode(hvd.allreduce)(tf.cast(total, dtype)).numpy().tolist() == [3, -3, 1, 0, 0]
            scaled = mode(lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0, postscale_factor=3.0))
            np.testing.assert_array_equal(scaled(own), [18.0, -13.5, 12000.0])
            half = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16))(own)
            assert half.dtype == tf.float32
            np.testing.assert_array_equal(half, [4.5, -6.75, 3000.0])
            whole = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16))
            assert whole(tf.constant([3])).dtype == tf.int32
        with pytest.deprecated_call():
            np.testing.assert_array_equal(hvd.allreduce(own, average=False), [4.5, -6.75, 3000.0])
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(own, average=True, op=hvd.Sum)

    job(2, check)


def test_variables_and_numbers_of_numpy_are_reduced(job: Any) -> None:
    def check() -> None:
        variable = tf.Variable([1.0, 2.0])
        for mode in MODES:
            assert mode(lambda: hvd.allreduce(variable, op=hvd.Sum))().numpy().tolist() == [2.0, 4.0]
            assert mode(lambda: hvd.allreduce(np.float32(3)))().numpy() == 3
        assert variable.numpy().tolist() == [1.0, 2.0]

    job(2, check)


def test_a_group_of_mixed_types_is_reduced_and_an_empty_one_comes_back(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for mode in MODES:
            mixed = mode(hvd.grouped_allreduce)([tf.constant([me, 1.0]), tf.constant(me), tf.ones([0, 3], tf.float16)])
            assert [each.dtype for each in mixed] == [tf.float32, tf.int32, tf.float16]
            assert mixed[0].numpy().tolist() == [1.0, 1.0] and int(mixed[1]) == 1 and mixed[2].shape == (0, 3)
            rows = mode(lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum))(tf.range(4.0))
            mine = [[0.0, 3.0], [6.0], [9.0]][me]
            assert rows[0].numpy().tolist() == mine and rows[1].numpy().tolist() == [2 * each for each in mine]
        assert hvd.grouped_allreduce([]) == [] and hvd.grouped_reducescatter([]) == []

    job(3, check)


def test_reducescatter_gives_each_rank_its_rows_of_the_reduction(job: Any) -> None:
    def check() -> None:
        me, size = hvd.rank(), hvd.size()
        for mode in MODES:
            for dtype in DATA_TYPES:
                if dtype == tf.bool:
                    continue
                for rows in (0, 1, 4, 7):
                    everybody = [values(rank, (rows, 3), dtype) for rank in range(size)]
                    found = mode(lambda x: hvd.reducescatter(x, op=hvd.Sum))(tensor(me, (rows, 3), dtype))
                    assert same(found, np.array_split(np.sum(everybody, axis=0), size)[me], dtype), (dtype, rows)
            found = mode(lambda x: hvd.reducescatter(x, prescale_factor=2.0))(tf.ones([3, 2]) * (me + 1))
            np.testing.assert_allclose(found, [[4.0, 4.0]])
        with pytest.raises(tf.errors.InvalidArgumentError, match="scalar"):
            hvd.reducescatter(tf.constant(1.0))

    job(3, check)


def test_indexed_slices_are_added_up_and_other_reductions_of_them_refused(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()

        def sparse() -> Any:
            return tf.IndexedSlices(tf.fill([me + 1, 2], me + 1.0), tf.range(me + 1), tf.constant([4, 2]))

        for mode in MODES:
            total = mode(lambda: tf.convert_to_tensor(hvd.allreduce(sparse(), op=hvd.Sum)))()
            assert total.numpy()[:, 0].tolist() == [3.0, 2.0, 0.0, 0.0]
            mean = mode(lambda: tf.convert_to_tensor(hvd.allreduce(sparse())))()
            assert mean.numpy()[:, 0].tolist() == [1.5, 1.0, 0.0, 0.0]
            both = mode(lambda: [tf.convert_to_tensor(x) for x in hvd.grouped_allreduce([sparse(), tf.ones([2])])])()
            assert both[0].numpy()[0, 0] == 1.5 and both[1].numpy().tolist() == [1.0, 1.0]
        for wrong in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
            with pytest.raises(NotImplementedError):
                hvd.allreduce(sparse(), **wrong)

    job(2, check)


def test_adasum_adds_orthogonal_and_averages_parallel_tensors(job: Any) -> None:
    def check() -> None:
        vectors = [np.array([3.0, 0.0]), np.array([0.0, 4.0])]
        for mode in MODES:
            orthogonal = mode(lambda x: hvd.allreduce(x, op=hvd.Adasum))(tf.constant(vectors[hvd.rank()]))
            np.testing.assert_allclose(orthogonal, [3.0, 4.0])
            parallel = mode(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Adasum))(tf.constant([2.0, 2.0]))
            np.testing.assert_allclose(parallel[1], [2.0, 2.0], rtol=1e-6)
        with pytest.raises(NotImplementedError, match="all ranks"):
            hvd.allreduce(tf.ones([2]), op=hvd.Adasum, process_set=hvd.ProcessSet([0, 1]))

    job(2, check)


def test_a_process_set_reduces_among_its_members_and_refuses_other_ranks(job: Any) -> None:
    def check(sets: list[Any]) -> None:
        pair, me = sets[0], hvd.rank()
        for mode in MODES:
            if pair.included():
                total = mode(lambda: hvd.allreduce(tf.constant([me]), op=hvd.Sum, process_set=pair, name="mine"))()
                assert total.numpy().tolist() == [2]
                spread = mode(lambda: hvd.broadcast(tf.constant(me), 2, process_set=pair))()
                assert int(spread) == 2
                assert int(mode(lambda: hvd.size_op(pair.process_set_id))()) == 2
            else:
                with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
                    mode(lambda: hvd.allreduce(tf.constant([me]), op=hvd.Sum, process_set=pair))()
            assert int(mode(lambda: hvd.process_set_included_op(1))()) == int(pair.included())
            assert int(mode(lambda: hvd.process_set_included_op(7))()) == -3
            assert [
                int(x) for x in mode(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])()
            ] == [me, 3, me, 3]

    job(3, check, sets=[[0, 2]])


def test_ranks_that_have_joined_add_zeros_and_all_learn_who_joined_last(job: Any) -> None:
    def check() -> list[Any]:
        totals = []
        for step in range(hvd.rank() + 1):
            totals.append(int(tf.function(lambda: hvd.allreduce(tf.constant(1), op=hvd.Sum, name="step"))()))
            assert step < 3
        return [*totals, int(tf.function(hvd.join)() if hvd.rank() == 1 else hvd.join())]

    assert job(3, check) == [[3, 2], [3, 2, 2], [3, 2, 1, 2]]
