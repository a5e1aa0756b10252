"""HOROVOD_DEBUG finds usual mistakes of a training with MXNet, and says where they are."""

from __future__ import annotations

import re
from typing import Any

import mxnet as mx
import pytest

import horovod.mxnet as hvd
from log_messages import LogMessages, line_of

DEBUG = {"HOROVOD_DEBUG": "1", "HOROVOD_DEBUG_STEPS": "4"}


def train(mistake: str, steps: int = 12) -> list[str]:
    """Train with one mistake; what this rank is told."""
    rank = hvd.rank()
    mx.random.seed(0 if mistake == "data" else rank)
    net = mx.gluon.nn.Dense(2, in_units=4, prefix="only_")
    net.initialize(mx.init.Constant(1.0))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
    with LogMessages() as messages:
        for step in range(steps):
            batch = mx.nd.random.uniform(shape=(2, 4))
            if mistake == "gradient" and rank == 1 and step == 5:
                batch[0, 0] = float("inf")
            with mx.autograd.record():
                loss = (net(batch) ** 2).sum()
            loss.backward()
            trainer.step(2)
            net.weight.data().wait_to_read()
            if mistake == "drift" and rank == 1 and step == 4:
                net.bias.set_data(net.bias.data() + 1e-6)
    return messages


@pytest.mark.parametrize("env", [DEBUG, {}], ids=["debug", "off"])
def test_a_right_loop_is_told_nothing(job: Any, env: dict[str, str]) -> None:
    assert job(2, train, "none", env=env) == [[], []]


def test_a_gradient_that_is_not_finite_is_told_by_its_rank(job: Any) -> None:
    first, (told,) = job(2, train, "gradient", 6, env=DEBUG)
    assert not first
    line = line_of(train, "hvd.DistributedTrainer(")
    assert re.match(
        rf"rank 1: the gradient of '.*' is not finite in step 6 of the optimizer made at {re.escape(__file__)}:{line}: ",
        told,
    ), told


def test_parameters_that_drift_apart_are_told(job: Any) -> None:
    (told,), other = job(2, train, "drift", env=DEBUG)
    assert not other
    assert re.search(r"drifted apart .*parameter only_bias: [0-9a-f]{12} on rank 0, [0-9a-f]{12} on rank 1", told), told


def test_equal_data_on_all_ranks_are_told_with_the_line_of_the_loop(job: Any) -> None:
    (told,), other = job(2, train, "data", env=DEBUG)
    assert not other
    assert told.startswith(
        "ranks 0, 1 have computed the same gradients, bit for bit, in the first 3 steps of the optimizer"
    )
    assert f"when rank 0 was at {__file__}:{line_of(train, 'trainer.step(')} in train" in told
