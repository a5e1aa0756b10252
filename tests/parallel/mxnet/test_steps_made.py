"""Ranks that leave with different numbers of steps are told."""

from __future__ import annotations

from typing import Any

import mxnet as mx

import horovod.mxnet as hvd
from leaving import departure, left_alone


def trained(call: Any, *args: Any) -> Any:
    """Call with a function that trains a network; what it returns."""
    net = mx.gluon.nn.Dense(1, in_units=2, prefix="only_")
    net.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    def train(steps: int) -> None:
        for _ in range(steps):
            with mx.autograd.record():
                loss = net(mx.nd.ones((2, 2))).sum()
            loss.backward()
            trainer.step(2)
            net.weight.data().wait_to_read()  # waitall() would raise what an earlier test has left in flight

    return call("horovod.mxnet", train, *args)


def test_a_difference_is_told_once_with_the_optimizer_and_the_numbers(job: Any) -> None:
    (text,) = [each for texts in job(2, trained, departure, 1) for each in texts]
    assert "different numbers of steps of the optimizer made at " in text and "test_steps_made.py" in text, text
    assert "3 steps on rank 1" in text or "3 on rank 1" in text, text


def test_ranks_that_are_alike_hear_nothing(job: Any) -> None:
    assert job(2, trained, departure, -1) == [[], []]


def test_a_rank_that_left_early_is_named_with_its_steps(job: Any) -> None:
    text, _ = job(2, trained, left_alone)
    assert "rank 1: it left the job (hvd.shutdown() or the end of its script) after 2 steps of the optimizer" in text, (
        text
    )
    assert "test_steps_made.py" in text, text
