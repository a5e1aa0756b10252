"""Many collectives in one graph, with one thread between operations, in another order on every rank; loops and branches."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.graph import operation
from time_limits import SOON

MANY = 60
"""Far more than the threads between operations, of which there is one."""


def test_sixty_collectives_run_in_a_function_in_another_order_on_every_rank(job: Any) -> None:
    def check() -> None:
        assert tf.config.threading.get_inter_op_parallelism_threads() == 1
        order = np.random.default_rng(hvd.rank()).permutation(MANY)

        @tf.function
        def together(sources: Any) -> Any:
            results: list[Any] = [None] * MANY
            for index in order:
                results[index] = hvd.allreduce(sources[index], op=hvd.Sum, name=f"tensor.{index}")
            return results

        for step in range(3):
            found = together([tf.fill([index % 7], float(index + step)) for index in range(MANY)])
            for index, each in enumerate(found):
                np.testing.assert_array_equal(each, np.full(index % 7, 3.0 * (index + step)))

    job(3, check)


def test_many_collectives_run_in_a_session_in_another_order_on_every_rank(job: Any) -> None:
    def check() -> None:
        order = np.random.default_rng(hvd.rank()).permutation(40)
        with tf.Graph().as_default():
            results: dict[int, Any] = {}
            for index in order:
                source = tf.constant(float(index)) * tf.cast(hvd.rank_op() + 1, tf.float32)
                results[index] = hvd.allreduce(source, op=hvd.Sum, name=f"tensor.{index}")
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
            with tf.compat.v1.Session(config=config) as session:
                for _ in range(2):
                    assert session.run([results[index] for index in range(40)]) == [3.0 * i for i in range(40)]
                assert session.run(results[7]) == 21.0  # of a graph only what is asked for is run

    job(2, check)


def test_every_operation_runs_in_a_session(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, [None, 2])
            rows, splits = hvd.alltoall(x, splits=tf.constant([1, 1]))
            total = hvd.allreduce(x, op=hvd.Sum)
            found = session.run(
                [
                    total,
                    hvd.allgather(x),
                    hvd.broadcast(x, 1),
                    rows,
                    splits,
                    hvd.reducescatter(x),
                    hvd.grouped_allreduce([x, x])[1],
                    tf.compat.v1.gradients(tf.reduce_sum(total), x)[0],
                    hvd.size_op(),
                ],
                {x: [[me, me], [me, 2.0]]},
            )
        sums, gathered, spread, some, received, part, average, gradient, size = found
        np.testing.assert_array_equal(sums, [[1, 1], [1, 4]])
        np.testing.assert_array_equal(gathered, [[0, 0], [0, 2], [1, 1], [1, 2]])
        np.testing.assert_array_equal(spread, [[1, 1], [1, 2]])
        np.testing.assert_array_equal(some, [[[0, 0], [1, 1]], [[0, 2], [1, 2]]][me])
        np.testing.assert_array_equal(received, [1, 1])
        np.testing.assert_array_equal(part, [[[0.5, 0.5]], [[0.5, 2]]][me])
        np.testing.assert_array_equal(average, [[0.5, 0.5], [0.5, 2]])
        np.testing.assert_array_equal(gradient, [[2, 2], [2, 2]])
        assert size == 2

    job(2, check)


def test_collectives_run_in_loops_branches_and_nested_functions(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        weight = tf.Variable(1.0)

        # AutoGraph needs sources, which functions sent to a rank do not have; this is what it would make.
        @tf.function
        def loop(steps: Any) -> Any:
            def body(step: Any, total: Any) -> tuple[Any, Any]:
                return step + 1, total + hvd.allreduce(tf.cast(step, tf.float32) + me, op=hvd.Sum)

            return tf.while_loop(lambda step, _: step < steps, body, [tf.constant(0), tf.constant(0.0)])[1]

        assert float(loop(tf.constant(20))) == 2 * sum(range(20)) + 20
        assert float(loop(tf.constant(3))) == 9.0

        @tf.function
        def choose(x: Any) -> Any:
            y = tf.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: hvd.allreduce(-10 * x, op=hvd.Sum))
            return tf.cond(x > 0, lambda: y + hvd.allreduce(x, op=hvd.Max), lambda: y)

        assert float(choose(tf.constant(me + 1.0))) == 5.0 and float(choose(tf.constant(-me - 1.0))) == 30.0

        @tf.function
        def inner(x: Any) -> Any:
            return hvd.allreduce(x * weight, op=hvd.Sum)

        @tf.function
        def other(x: Any) -> Any:
            return hvd.allreduce(x + weight, op=hvd.Sum)

        @tf.function
        def outer(x: Any) -> Any:
            calls = [inner, other] if me else [other, inner]
            results = [each(x) for each in calls]
            return results if me else results[::-1]

        for _ in range(3):
            assert [float(each) for each in outer(tf.constant(float(me)))] == [1.0, 3.0]

        with tf.GradientTape() as tape:
            y = inner(tf.constant(3.0))  # the tape is outside, so the gradient is a function of TensorFlow's own
        assert float(tape.gradient(y, weight)) == 6.0

    job(2, check)


def test_a_function_traced_again_keeps_its_names(job: Any) -> None:
    def check() -> None:
        names: list[list[str]] = []

        @tf.function
        def reduce(x: Any) -> Any:
            y = hvd.allreduce(x) + hvd.allreduce(2 * x) + hvd.allreduce(x, name="given")
            operations = tf.compat.v1.get_default_graph().get_operations()
            names.append([each.name for each in operations if each.type in ("EagerPyFunc", "QueueDequeueV2")])
            return y

        for count in range(1, 4):
            np.testing.assert_array_equal(reduce(tf.ones([count])), np.full(count, 4.0))
        assert len(names) == 3 and names[0] == names[1] == names[2]
        assert "HorovodAllreduce_x_0" in names[0] and "HorovodAllreduce_mul_0" in names[0] and "given" in names[0]

    job(2, check)


def test_ranks_may_have_made_different_numbers_of_tensors(job: Any) -> None:
    def check() -> None:
        for _ in range(5 * hvd.rank()):
            tf.constant(1.0) + 1
        made_outside = tf.constant(2.0)
        assert float(tf.function(lambda: hvd.allreduce(made_outside, op=hvd.Sum))()) == 4.0

    job(2, check)


def test_functions_called_by_several_threads_get_their_own_results(job: Any) -> None:
    def check() -> None:
        reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="shared"))
        others = [tf.function(lambda x, i=i: hvd.allreduce(x, op=hvd.Sum, name=f"thread.{i}")) for i in range(4)]
        wrong: list[Any] = []

        def work(number: int) -> None:
            for step in range(20):
                found = float(others[number](tf.constant(float(step), name="x")))
                if found != 2.0 * step:
                    wrong.append((number, step, found))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        assert float(reduce(tf.constant(1.0))) == 2.0

    job(2, check)


def test_a_run_that_is_cancelled_does_not_confuse_the_next(job: Any) -> None:
    def check() -> None:
        @tf.function
        def reduce(x: Any, wrong: Any) -> Any:
            y = hvd.allreduce(x, op=hvd.Sum, name="reduced")
            tf.debugging.assert_less(wrong, 1.0, message="as the test wants it")
            return y

        for step in range(6):
            if step % 2:
                with pytest.raises(tf.errors.InvalidArgumentError, match="as the test wants it"):
                    reduce(tf.constant(float(step)), tf.constant(2.0))
                hvd.broadcast_object(None)  # what was submitted has come to an end everywhere
            else:
                assert float(reduce(tf.constant(float(step)), tf.constant(0.0))) == 2.0 * step

    job(2, check)


def test_runs_that_are_cancelled_do_not_pile_up_results(job: Any) -> None:
    def check() -> None:
        @tf.function
        def reduce(x: Any) -> Any:
            y = hvd.allreduce(x, op=hvd.Sum, name="reduced")
            tf.debugging.assert_less(x[0], 1.0, message="as the test wants it")
            return y

        for _ in range(40):
            with pytest.raises(tf.errors.InvalidArgumentError, match="as the test wants it"):
                reduce(tf.ones([1 << 18]))
            hvd.broadcast_object(None)  # what was submitted has come to an end everywhere
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, operation._Pending)]
        assert len(kept) <= 2 * operation._RUNS_KEPT

    job(2, check)


def test_memory_is_not_copied_and_not_shared_too_early(job: Any) -> None:
    def check() -> None:
        variable = tf.Variable(tf.ones([1 << 16]))

        @tf.function
        def step() -> Any:
            reduced = hvd.allreduce(variable, op=hvd.Sum, name="variable")
            variable.assign_add(reduced)
            return reduced

        results = [step() for _ in range(5)]
        for number, each in enumerate(results):
            np.testing.assert_array_equal(each, np.full(1 << 16, 2.0 * 3.0**number))

    job(2, check)
