"""Optimizers of TensorFlow 1, in sessions and eagerly, against the same optimizer in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

v1 = tf.compat.v1
STEPS = 5


def target(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).normal(size=3).astype(np.float32)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9)


def train(optimizer: Any, feeds: Callable[[int], Any], steps: int = STEPS, sparse: bool = False) -> Any:
    """The variable after some steps in a session that begins with rank 0's values, and the global step."""
    with tf.Graph().as_default():
        variable = v1.get_variable("variable", initializer=tf.ones([3]) * (hvd.rank() + 1))
        x = v1.placeholder(tf.float32, [3])
        used = tf.gather(variable, [0, 1, 2]) if sparse else variable
        loss = tf.reduce_sum(tf.square(used - x))
        step = v1.train.get_or_create_global_step()
        train_op = optimizer().minimize(loss, global_step=step)
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
            for number in range(steps):
                session.run(train_op, {x: feeds(number)})
            return session.run([variable, step], {x: feeds(0)})


def reference(gradients: Callable[[Any, int], Any], steps: int = STEPS) -> Any:
    """Momentum as TensorFlow 1 has it, from ones."""
    variable, velocity = np.ones(3, np.float32), np.zeros(3, np.float32)
    for number in range(steps):
        velocity = 0.9 * velocity + gradients(variable, number)
        variable = variable - 0.1 * velocity
    return variable


def test_training_equals_one_process_with_all_the_data(job: Any) -> None:
    def check() -> None:
        def average(variable: Any, step: int) -> Any:
            return np.mean([2 * (variable - target(rank, step)) for rank in range(2)], axis=0)

        wanted = reference(average)
        ways: list[dict[str, Any]] = [{}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}, {"groups": 1}]
        for sparse in (False, True):
            for way in ways:
                found, steps = train(
                    lambda w=way: hvd.DistributedOptimizer(momentum(), **w),
                    lambda step: target(hvd.rank(), step),
                    sparse=sparse,
                )
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
                assert steps == STEPS

    job(2, check)


def test_gradients_accumulate_over_several_passes(job: Any) -> None:
    def check() -> None:
        for averaged in (False, True):

            def total(variable: Any, step: int, averaged: bool = averaged) -> Any:
                passes = [2 * (variable - target(rank, n)) for rank in range(2) for n in (2 * step, 2 * step + 1)]
                return np.sum(passes, axis=0) / (4 if averaged else 2)

            found, steps = train(
                lambda a=averaged: hvd.DistributedOptimizer(
                    momentum(), backward_passes_per_step=2, average_aggregated_gradients=a
                ),
                lambda step: target(hvd.rank(), step),
                steps=6,
            )
            np.testing.assert_allclose(found, reference(total, 3), rtol=1e-5)
            assert steps == 6
        with pytest.raises(ValueError, match="eager"):
            hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
        with pytest.raises(ValueError, match="IndexedSlices are not supported"):
            train(lambda: hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2), lambda _: 0, sparse=True)

    job(2, check)


def test_adasum_combines_the_steps_of_all_ranks(job: Any) -> None:
    def check() -> None:
        def combine(one: Any, two: Any) -> Any:
            dot, ones, twos = one @ two, one @ one, two @ two
            return one * (1 - dot / (2 * ones)) + two * (1 - dot / (2 * twos))

        for passes in (1, 2):
            variable = np.ones(3)
            velocities = [np.zeros(3), np.zeros(3)]
            for cycle in range(4 // passes):
                ends = []
                for rank in range(2):
                    own = variable.copy()
                    for step in range(cycle * passes, (cycle + 1) * passes):
                        velocities[rank] = 0.9 * velocities[rank] + 2 * (own - target(rank, step))
                        own = own - 0.1 * velocities[rank]
                    ends.append(own - variable)
                variable = variable + combine(*ends)
            found, steps = train(
                lambda p=passes: hvd.DistributedOptimizer(momentum(), op=hvd.Adasum, backward_passes_per_step=p),
                lambda step: target(hvd.rank(), step),
                steps=4,
            )
            np.testing.assert_allclose(found, variable, rtol=1e-4)
            assert steps == 4
        with pytest.raises(ValueError, match="average_aggregated_gradients"):
            hvd.DistributedOptimizer(momentum(), op=hvd.Adasum, average_aggregated_gradients=True)

    job(2, check)


def test_optimizers_of_tensorflow_1_train_eagerly(job: Any) -> None:
    def check() -> None:
        variable = tf.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
        pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(variable) * (hvd.rank() + 1), [variable])
        assert pairs[0][0].numpy().tolist() == [1.5, 1.5]
        optimizer.apply_gradients(pairs)
        assert variable.numpy().tolist() == [0.25, 1.25]
        assert optimizer.get_name() == "DistributedGradientDescentOptimizer"
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer)

    job(2, check)


def test_gradients_of_local_variables_stay_on_their_rank_and_slots_can_be_read(job: Any) -> None:
    def check() -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            shared, own = v1.get_variable("s", initializer=1.0), v1.get_variable("o", initializer=1.0)
            optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1))
            optimizer.register_local_var(own)
            pairs = optimizer.compute_gradients((shared + own) * (hvd.rank() + 1.0))
            assert [variable.name for _, variable in pairs] == ["s:0", "o:0"]
            apply = optimizer.apply_gradients(pairs)
            session.run(v1.global_variables_initializer())
            found = session.run([gradient for gradient, _ in pairs])
            assert found == [1.5, (hvd.rank() + 1.0) / 2]
            session.run(apply)
            assert optimizer.get_slot_names() == ["m", "v"] and len(optimizer.variables()) == 6
            assert session.run(optimizer.get_slot(shared, "m")) == pytest.approx(0.15)

    job(2, check)


def test_the_aggregation_helper_accumulates_eagerly_and_in_functions(job: Any) -> None:
    def check() -> None:
        for mode in (lambda function: function, tf.function):
            helper = hvd.LocalGradientAggregationHelper(
                3, lambda gradients, _: [hvd.allreduce(each, name="sum") for each in gradients]
            )
            iterations = tf.Variable(0, dtype=tf.int64)

            class Optimizer:
                pass

            optimizer = Optimizer()
            optimizer.iterations = iterations  # type: ignore[attr-defined]  # what scripts' optimizers have
            applied = tf.Variable(0.0)

            def step(x: Any, helper: Any = helper, applied: Any = applied, optimizer: Any = optimizer) -> Any:
                found = helper.compute_gradients([x, None], [applied, applied])
                with tf.control_dependencies([found[0]]):
                    helper.apply_gradients(lambda: applied.assign_add(found[0]), optimizer)
                return found[0]

            run = mode(lambda x, step=step: step(x)) if mode is tf.function else step
            found = [float(run(tf.constant(hvd.rank() + 1.0))) for _ in range(6)]
            own = hvd.rank() + 1.0
            assert found == [own, 2 * own, 4.5, own, 2 * own, 4.5]
            assert float(applied) == 9.0 and int(iterations) == 4
        with pytest.raises(ValueError, match="must be > 0"):
            hvd.LocalGradientAggregationHelper(0, lambda gradients, _: gradients)

    job(2, check)
