"""HOROVOD_DEBUG finds usual mistakes of a training with Keras, on each backend, and says where they are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jobs import Job, make_job
from keras_ranks import tensorflow_pool
from log_messages import LogMessages, line_of
from part import some

DEBUG = {"HOROVOD_DEBUG": "1", "HOROVOD_DEBUG_STEPS": "4"}


def train(mistake: str, steps: int = 9, hvd: Any = None, keras: Any = None, eager: bool = False) -> list[str]:
    """Fit a model with one mistake; what this rank is told."""
    import numpy as np

    if keras is None:
        import keras

        import horovod.keras as hvd
    rank = hvd.rank()
    random = np.random.default_rng(0 if mistake == "data" else rank)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="only")])
    model.set_weights([np.ones((4, 2)), np.zeros(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001))
    model.compile(optimizer, "mse", run_eagerly=eager)
    with LogMessages() as messages:
        for step in range(steps):
            x, y = random.normal(size=(2, 4)).astype(np.float32), random.normal(size=(2, 2)).astype(np.float32)
            if mistake == "gradient" and rank == 1 and step == 5:
                y[1, 1] = np.inf
            model.fit(x, y, batch_size=2, verbose=0, shuffle=False)
            if mistake == "drift" and rank == 1 and step == 4:
                kernel, bias = model.get_weights()
                model.set_weights([kernel, bias + np.float32([0.0, 1e-6])])
    return messages


def check_gradient(first: list[str], second: list[str]) -> None:
    assert not first and len(second) == 1
    found = re.match(
        r"rank 1: the gradient of '.*(kernel|bias).*' is not finite in step 6 of the optimizer made at "
        rf"{re.escape(__file__)}:{line_of(train, 'hvd.DistributedOptimizer(')}: of [28] elements (\d) are NaN and (\d) ",
        second[0],
    )
    assert found is not None and int(found[2]) + int(found[3]) > 0, second


def check_drift(first: list[str], second: list[str]) -> None:
    assert len(first) == 1 and not second
    made = f"{re.escape(__file__)}:{line_of(train, 'hvd.DistributedOptimizer(')}"
    assert re.search(
        rf"drifted apart after a step \(of the optimizer made at {made}\): .*bias.*: "
        r"[0-9a-f]{12} on rank 0, [0-9a-f]{12} on rank 1\. ",
        first[0],
    ), first


def check_data(first: list[str], second: list[str]) -> None:
    assert len(first) == 1 and not second
    assert first[0].startswith(
        "ranks 0, 1 have computed the same gradients, bit for bit, in the first 3 steps of the optimizer"
    )
    assert (
        f"when rank 0 was at {__file__}:{line_of(train, 'model.fit(')} in train: they train on the same batches"
        in first[0]
    )


CHECKS = {"gradient": check_gradient, "drift": check_drift, "data": check_data}
STEPS = {"gradient": 6, "drift": 12, "data": 12}
"""After the sixth step the parameters of all ranks are not finite either."""
FOUND = pytest.mark.parametrize("mistake", list(CHECKS))


@pytest.mark.parametrize("env", [DEBUG, {}], ids=["debug", "off"])
def test_a_right_training_is_told_nothing(job: Job, env: dict[str, str]) -> None:
    assert job(2, train, "none", env=env) == [[], []]


@FOUND
def test_a_mistake_is_told_once_with_the_line(job: Job, mistake: str) -> None:
    CHECKS[mistake](*job(2, train, mistake, STEPS[mistake], env=DEBUG))


def of_tensorflow(*args: Any) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    return train(*args[:2], hvd, tf.keras, *args[2:])


@pytest.mark.parametrize(
    ("version", "eager"), some([(2, False), (2, True), (3, False), (3, True)], [(2, False), (3, True)])
)
@pytest.mark.parametrize("mistake", [*CHECKS, "none"])
def test_so_it_is_with_tf_keras(ranks: Any, version: int, mistake: str, eager: bool) -> None:
    job = make_job(lambda size: tensorflow_pool(ranks, version), "horovod.tensorflow.keras")
    told = job(2, of_tensorflow, mistake, STEPS.get(mistake, 12), eager, env=DEBUG)
    if mistake == "none":
        assert told == [[], []]
    else:
        CHECKS[mistake](*told)
