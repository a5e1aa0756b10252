"""Ranks that leave with different numbers of steps are told: a tape, and an optimizer, eagerly and in functions."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from leaving import departure, left_alone


def trained(by_tape: bool, graph: bool, call: Any, *args: Any) -> Any:
    """Call with a function that trains a variable; what it returns."""
    weight = tf.Variable([1.0, 2.0], name="weight")
    plain: Any = tf.keras.optimizers.SGD(0.1)
    optimizer = plain if by_tape else hvd.DistributedOptimizer(plain)
    optimizer.build([weight])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        reducing = hvd.DistributedGradientTape(tape) if by_tape else tape
        optimizer.apply_gradients([(reducing.gradient(loss, weight), weight)])

    run = tf.function(step) if graph else step

    def train(steps: int) -> None:
        for _ in range(steps):
            run()

    return call("horovod.tensorflow", train, *args)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("by_tape", [False, True])
def test_a_difference_is_told_once_with_the_numbers(job: Any, by_tape: bool, graph: bool) -> None:
    (text,) = [each for texts in job(2, trained, by_tape, graph, departure, 1) for each in texts]
    assert "different numbers of steps of the optimizer made at " in text and "test_steps_made.py" in text, text
    assert "3 steps on rank 1" in text or "3 on rank 1" in text, text
    assert job(2, trained, by_tape, graph, departure, -1) == [[], []]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("by_tape", [False, True])
def test_a_rank_that_left_early_is_named_with_its_steps(job: Any, by_tape: bool, graph: bool) -> None:
    text, _ = job(2, trained, by_tape, graph, left_alone)
    assert "rank 1: it left the job (hvd.shutdown() or the end of its script) after 2 steps of " in text, text
    assert "test_steps_made.py" in text, text
