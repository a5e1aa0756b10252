"""The gradient that each operation has, eagerly and in functions, by the rule that scripts rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

MODES: list[Callable[[Any], Any]] = [lambda function: function, tf.function]


def gradient(operation: Callable[[Any], Any], weights: Callable[[Any], Any], x: Any) -> Any:
    """Of the sum of an operation's output times this rank's weights."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = operation(x)
        loss = tf.add_n([tf.reduce_sum(each * weights(each)) for each in tf.nest.flatten(output)])
    return tape.gradient(loss, x)


def test_gradients_of_every_operation_match_their_formula(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        x = tf.constant([[1.0, 2.0]] * 3)
        mine = float(me + 1)  # weights 1, 2, 3; their sum is 6 and their mean 2

        def weights(output: Any) -> Any:
            return tf.ones_like(output) * mine

        def by_row(output: Any) -> Any:
            return tf.cast(tf.range(tf.shape(output)[0]), tf.float32)[:, None] * mine

        for mode in MODES:

            def found(operation: Any, weigh: Any = weights, mode: Any = mode) -> Any:
                return mode(lambda: gradient(operation, weigh, x))().numpy()

            full = np.ones((3, 2))
            np.testing.assert_allclose(found(hvd.allreduce), 2 * full)
            np.testing.assert_allclose(found(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum")), 6 * full)
            scaled = found(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
            np.testing.assert_allclose(scaled, 9 * full)
            halves = found(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))
            np.testing.assert_allclose(halves, 2 * full)
            grouped = found(lambda x: hvd.grouped_allreduce([x, 10 * x], op=hvd.Sum))
            np.testing.assert_allclose(grouped, 66 * full)
            np.testing.assert_allclose(found(lambda x: hvd.broadcast(x, 1)), (2 if me == 1 else 0) * full)
            gathered = found(lambda x: hvd.allgather(x[: me + 1]), by_row)
            first = [0, 1, 3][me]
            wanted = [2.0 * (first + row) if row <= me else 0.0 for row in range(3)]
            np.testing.assert_allclose(gathered[:, 0], wanted)
            both = found(lambda x: hvd.grouped_allgather([x[: me + 1], x[: me + 1] * 10]), by_row)
            np.testing.assert_allclose(both[:, 0], [11 * each for each in wanted])
            np.testing.assert_allclose(found(hvd.alltoall)[:, 0], [1.0, 2.0, 3.0])
            part = found(lambda x: hvd.alltoall(x, splits=[0, 1, 1])[0])
            np.testing.assert_allclose(part[:, 0], [2.0, 3.0, 0.0])
            np.testing.assert_allclose(found(hvd.reducescatter)[:, 0], [1.0, 2.0, 3.0])
            total = found(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5))
            np.testing.assert_allclose(total[:, 0], [1.5, 3.0, 4.5])
            pieces = found(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum))
            np.testing.assert_allclose(pieces[:, 0], [6.0, 12.0, 18.0])

    job(3, check)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x])[0],
    "allgather": hvd.allgather,
    "grouped_allgather": lambda x: hvd.grouped_allgather([x])[0],
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": hvd.alltoall,
    "alltoall_with_splits": lambda x: hvd.alltoall(x, splits=tf.constant([1, 1]))[0],
    "reducescatter": hvd.reducescatter,
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x])[0],
}


def test_gradients_do_not_depend_on_what_is_known_of_shapes_nor_on_how_tensorflow_passes_them(job: Any) -> None:
    """Inputs of any static shape, also of unknown rank; outputs that are gathered from, whose gradients are IndexedSlices."""

    def check() -> None:
        def rows() -> Any:
            return tf.numpy_function(lambda: np.array([1, 0]), [], tf.int64)

        def loss(operation: Any, x: Any) -> Any:
            found = operation(tf.gather(x, rows()))
            return tf.reduce_sum(tf.gather(found, tf.range(tf.shape(found)[0])) * 2.0)

        def gradient(operation: Any, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(operation, x)
            return tf.convert_to_tensor(tape.gradient(value, x))

        x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        for name, operation in OPERATIONS.items():
            expected = gradient(operation, x).numpy()
            assert expected.any() or hvd.rank() == 1, name  # of a broadcast, only the root has one
            for known in ([2, 2], [None, 2], None):
                traced = tf.function(gradient, autograph=False).get_concrete_function(
                    operation, tf.TensorSpec(known, tf.float32)
                )
                np.testing.assert_allclose(traced(x=x), expected, err_msg=f"{name} {known}")

    job(2, check)


def test_a_gradient_of_a_gradient_is_right(job: Any) -> None:
    def check() -> None:
        x = tf.constant(3.0)

        @tf.function
        def second() -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = hvd.allreduce(x * x * x, op=hvd.Sum)
                first = inner.gradient(y, x)  # of the ranks' sum: 2 * 3 x^2
            return first, outer.gradient(first, x)

        first, again = second()
        assert float(first) == 54.0 and float(again) == 36.0

    job(2, check)


def test_gradients_in_a_graph_of_tensorflow_1_whose_tensors_depend_on_variables(job: Any) -> None:
    """Rows and splits from variables; the gradient, and the gradient of it."""

    def check() -> None:
        def values(operation: Any) -> Any:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                table = tf.compat.v1.get_variable("table", initializer=[[1.0, 2.0], [3.0, 4.0]])
                split = tf.compat.v1.get_variable("splits", initializer=[1, 1], trainable=False)
                found = operation(tf.nn.embedding_lookup(table, [1, 0]), split)
                first = tf.convert_to_tensor(tf.gradients(found * found * found, table)[0])
                second = tf.convert_to_tensor(tf.gradients(first, table)[0])
                session.run(tf.compat.v1.global_variables_initializer())
                return session.run([first, second])

        def eagerly(operation: Any) -> Any:
            table = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    found = operation(tf.nn.embedding_lookup(table, [1, 0]), tf.Variable([1, 1]))
                    cubes = found * found * found
                first = tf.convert_to_tensor(inner.gradient(cubes, table))
            return first, tf.convert_to_tensor(outer.gradient(first, table))

        by_variable = {"alltoall by a variable": lambda x, splits: hvd.alltoall(x, splits=splits.read_value())[0]}
        without = {name: lambda x, _, of=operation: of(x) for name, operation in OPERATIONS.items()}
        for name, operation in {**without, **by_variable}.items():
            for one, two in zip(values(operation), eagerly(operation), strict=True):
                np.testing.assert_allclose(one, two, err_msg=name)

    job(2, check)
