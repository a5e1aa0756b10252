"""allgather, broadcast and alltoall: every type, eagerly and in functions, and variables in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.tensors import DATA_TYPES

MODES: list[Callable[[Any], Any]] = [lambda function: function, tf.function]


def rows(rank: int, count: int, dtype: tf.DType) -> Any:
    return tf.cast(tf.reshape(tf.range(count * 3) + rank, [count, 3]) % 2, dtype)


def test_allgather_concatenates_rows_in_rank_order(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for mode in MODES:
            for dtype in DATA_TYPES:
                wanted = tf.concat([rows(rank, 2 * rank, dtype) for rank in range(3)], 0)
                found = mode(hvd.allgather)(rows(me, 2 * me, dtype))
                assert found.dtype == dtype
                np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(wanted, tf.float32))
            some = mode(hvd.grouped_allgather)([tf.fill([me, 2], 1.0), tf.constant([me])])
            assert isinstance(some, list) and some[0].shape == (3, 2) and some[1].numpy().tolist() == [0, 1, 2]
        assert hvd.grouped_allgather([]) == []

        @tf.function
        def shape(x: Any) -> Any:
            return tf.constant(hvd.allgather(x).shape.as_list()[1])

        assert int(shape(tf.ones([me, 5]))) == 5

    job(3, check)


def test_broadcast_sends_the_tensor_of_the_root(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for mode in MODES:
            for dtype in DATA_TYPES:
                for shape in ((), (0, 2), (4,)):
                    source = tf.cast(tf.fill(shape, me), dtype)
                    found = mode(lambda x: hvd.broadcast(x, 1))(source)
                    assert found.dtype == dtype and found.shape == shape
                    assert np.all(tf.cast(found, tf.int32).numpy() == 1)
                    assert np.all(tf.cast(source, tf.int32).numpy() == (bool(me) if dtype == tf.bool else me))
            with pytest.raises(tf.errors.InvalidArgumentError, match="invalid root rank 5"):
                mode(lambda x: hvd.broadcast(x, 5))(tf.constant(1))

    job(3, check)


def test_variables_are_broadcast_in_place(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for mode in MODES:
            variables = [tf.Variable([me, 1]), tf.Variable(float(me)), tf.Variable([me > 0])]
            values = mode(lambda v=variables: hvd.broadcast_(v, 1))()
            assert [each.numpy().tolist() for each in values] == [[1, 1], 1.0, [True]]
            assert [each.numpy().tolist() for each in variables] == [[1, 1], 1.0, [True]]

            def spreading(variables: Any, inplace: bool) -> Any:
                def spread() -> None:
                    hvd.broadcast_variables(variables, 2, inplace=inplace)

                return spread

            of_keras = tf.keras.Variable([float(me)])
            for inplace in (False, True):
                variables[0].assign([me, 5])
                of_keras.assign([float(me)])
                mode(spreading([*variables, of_keras], inplace))()
                assert variables[0].numpy().tolist() == [2, 5] and of_keras.numpy().tolist() == [2.0]
        assert hvd.broadcast_([], 0) == [] and hvd.broadcast_variables([], 0) is None
        with pytest.raises(RuntimeError, match="does not support eager execution"):
            hvd.broadcast_global_variables(0)

    job(3, check)


def test_alltoall_sends_rows_to_every_rank(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for mode in MODES:
            for dtype in DATA_TYPES:
                even = mode(hvd.alltoall)(rows(me, 6, dtype))
                wanted = tf.concat([rows(rank, 6, dtype)[2 * me : 2 * me + 2] for rank in range(3)], 0)
                np.testing.assert_array_equal(tf.cast(even, tf.float32), tf.cast(wanted, tf.float32))
            uneven = mode(lambda x, s: hvd.alltoall(x, splits=s))
            output, received = uneven(tf.range(10) + 10 * me, tf.constant([1, 2, 3]))
            start = [0, 1, 3][me]
            assert output.numpy().tolist() == [10 * rank + start + i for rank in range(3) for i in range(me + 1)]
            assert received.dtype == tf.int32 and received.numpy().tolist() == [me + 1] * 3
            for splits, message in (([1, 2], "does not equal"), ([9, 9, 9], "greater than")):
                with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                    uneven(tf.range(10), tf.constant(splits))
            with pytest.raises(tf.errors.InvalidArgumentError, match="even multiple"):
                mode(hvd.alltoall)(tf.range(7))
        with pytest.raises(tf.errors.InvalidArgumentError, match="32-bit"):
            hvd.alltoall(tf.range(3), splits=tf.constant([1, 1, 1], tf.int64))
        with pytest.raises(tf.errors.InvalidArgumentError, match="1D"):
            hvd.alltoall(tf.range(3), splits=tf.constant([[1, 1, 1]]))

    job(3, check)


def test_objects_are_broadcast_and_gathered(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        mine = {"rank": me, "text": "x" * me}
        assert hvd.broadcast_object(mine, 2) == {"rank": 2, "text": "xx"}
        assert hvd.broadcast_object_fn(root_rank=1)(mine)["rank"] == 1
        assert hvd.allgather_object(mine) == [{"rank": rank, "text": "x" * rank} for rank in range(3)]
        with tf.Graph().as_default():  # no session is needed
            assert hvd.broadcast_object(mine, 0)["rank"] == 0

    job(3, check)
