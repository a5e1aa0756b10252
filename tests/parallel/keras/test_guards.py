"""What differs between ranks and no collective shows is told: learning rates, and weights that were never broadcast."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import Job, make_job
from keras_ranks import tensorflow_pool
from part import some


def steps(rate_of_rank: Any, weights_of_rank: Any) -> list[str]:
    """Train six steps, in which the rate and the first weights depend on the rank. Returns the warnings."""
    import warnings

    import keras
    import numpy as np

    import horovod.keras as hvd

    rank = hvd.rank()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="only")])
    model.set_weights([np.full((2, 1), weights_of_rank(rank)), np.zeros(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    model.compile(optimizer, "mse", jit_compile=False if keras.backend.backend() != "jax" else "auto")
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 2:
                optimizer.learning_rate = rate_of_rank(rank)
            model.fit(x, y, batch_size=4, verbose=0)
    return [
        str(each.message) for each in caught if "Ranks are about" in str(each.message) or "differ" in str(each.message)
    ]


def test_ranks_that_are_alike_are_told_nothing(job: Job) -> None:
    assert job(2, steps, lambda rank: 0.05, lambda rank: 0.0) == [[], []]


def test_rates_that_differ_are_told_once(job: Job) -> None:
    told, silent = job(2, steps, lambda rank: 0.05 + 0.05 * rank, lambda rank: 0.0)
    assert len(told) == 1 and silent == []
    assert "different hyper-parameters" in told[0] and "learning_rate: 0.05" in told[0] and "0.1" in told[0]
    assert "on rank 0" in told[0] and "on rank 1" in told[0] and "ReduceLROnPlateau" in told[0]
    assert "test_guards.py" in told[0] and "HOROVOD_CHECK=off hides it" in told[0]


def test_weights_that_were_not_broadcast_are_told_once(job: Job) -> None:
    told, silent = job(2, steps, lambda rank: 0.05, lambda rank: float(rank))
    assert len(told) == 1 and silent == []
    assert "parameters of the ranks differ" in told[0] and "only/kernel" in told[0] and "] on rank 1" in told[0]


def test_weights_that_the_first_step_rounds_otherwise_are_told_nothing(job: Job) -> None:
    assert job(2, steps, lambda rank: 0.05, lambda rank: 0.3 + 2.0**-20 * rank) == [[], []]


def test_as_an_error_all_ranks_raise_it(job: Job) -> None:
    def check(steps: Any) -> str:
        with pytest.raises(Exception, match="different hyper-parameters") as error:
            steps(lambda rank: 0.05 + 0.05 * rank, lambda rank: 0.0)
        return str(error.value)

    for text in job(2, check, steps, env={"HOROVOD_CHECK": "error"}):
        assert "learning_rate: 0.05" in text


def test_turned_off_nothing_is_compared(job: Job) -> None:
    off = {"HOROVOD_CHECK": "off"}
    assert job(2, steps, lambda rank: 0.05 + rank, lambda rank: float(rank), env=off) == [[], []]


@pytest.mark.parametrize(
    ("version", "graph"), some([(2, False), (2, True), (3, False), (3, True)], [(2, False), (3, True)])
)
def test_variables_of_a_tape_that_were_not_broadcast_are_told_once(ranks: Any, version: int, graph: bool) -> None:
    def check(graph: bool) -> list[str]:
        import warnings

        import tensorflow as tf

        import horovod.tensorflow as hvd
        import horovod.tensorflow.keras as hvd_keras

        weight = tf.Variable([1.0 + hvd.rank()], name="weight")
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 + 0.1 * hvd.rank()))
        optimizer.build([weight])
        plain = tf.Variable([1.0 + hvd.rank()], name="of_the_tape")

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2)
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(plain**2)
            plain.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, plain))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = tf.function(step) if graph else step
            for _ in range(5):
                run()
        return [
            str(each.message)
            for each in caught
            if "Ranks are about" in str(each.message) or "differ" in str(each.message)
        ]

    job = make_job(lambda size: tensorflow_pool(ranks, version), "horovod.tensorflow.keras")
    told, silent = job(2, check, graph)
    assert silent == [] and len(told) == 3
    assert "learning_rate: 0.1" in "".join(told) and "variable of_the_tape" in "".join(told)
    assert "parameter 0 (" in "".join(told)
