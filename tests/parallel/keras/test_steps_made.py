"""Ranks that leave with different numbers of steps are told, on every backend."""

from __future__ import annotations

from typing import Any

from jobs import Job
from leaving import departure, left_alone


def trained(call: Any, *args: Any) -> Any:
    """Call with a function that trains a model; what it returns."""
    import keras
    import numpy as np

    import horovod.keras as hvd

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([np.zeros((2, 1)), np.zeros(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

    def train(steps: int) -> None:
        model.fit(np.ones((4 * steps, 2), np.float32), np.ones((4 * steps, 1), np.float32), batch_size=4, verbose=0)

    return call("horovod.keras", train, *args)


def test_a_difference_is_told_once_with_the_optimizer_and_the_numbers(job: Job) -> None:
    (text,) = [each for texts in job(2, trained, departure, 1) for each in texts]
    assert "different numbers of steps of the optimizer made at " in text and "test_steps_made.py" in text, text
    assert "3 steps on rank 1" in text or "3 on rank 1" in text, text


def test_ranks_that_are_alike_hear_nothing(job: Job) -> None:
    assert job(2, trained, departure, -1) == [[], []]


def test_a_rank_that_left_early_is_named_with_its_steps(job: Job) -> None:
    text, _ = job(2, trained, left_alone)
    assert "rank 1: it left the job (hvd.shutdown() or the end of its script) after 2 steps of the optimizer" in text
    assert "test_steps_made.py" in text
