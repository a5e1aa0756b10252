"""What differs between ranks and no collective shows is told: learning rates, and weights that were never broadcast."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest

import horovod.mxnet as hvd


def steps(rate_of_rank: Any, weight_of_rank: Any) -> list[str]:
    """Train six steps, in which the rate and the first weights depend on the rank. Returns the warnings."""
    rank = hvd.rank()
    # With a name of its own: MXNet counts layers without one, on the ranks of a pool that take part in this test alone.
    net = mx.gluon.nn.Dense(1, in_units=2, prefix="only_")
    net.initialize(mx.init.Constant(weight_of_rank(rank)))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 2:
                trainer.set_learning_rate(rate_of_rank(rank))
            with mx.autograd.record():
                loss = net(mx.nd.ones((2, 2))).sum()
            loss.backward()
            trainer.step(2)
            net.weight.data().wait_to_read()  # waitall() would raise what an earlier test has left in flight
    return [str(each.message) for each in caught if "differ" in str(each.message)]


def test_ranks_that_are_alike_are_told_nothing(job: Any) -> None:
    assert job(2, steps, lambda rank: 0.05, lambda rank: 0.0) == [[], []]


def test_rates_that_differ_are_told_once(job: Any) -> None:
    told, silent = job(2, steps, lambda rank: 0.05 + 0.05 * rank, lambda rank: 0.0)
    assert len(told) == 1 and silent == []
    assert "different hyper-parameters" in told[0] and "lr: 0.05" in told[0] and "0.1" in told[0], told
    assert "on rank 0" in told[0] and "on rank 1" in told[0] and "test_guards.py" in told[0], told


def test_weights_that_were_not_broadcast_are_told_once(job: Any) -> None:
    told, silent = job(2, steps, lambda rank: 0.05, float)
    assert len(told) == 1 and silent == []
    assert "parameters of the ranks differ" in told[0] and "weight" in told[0], told


def test_weights_that_the_first_step_rounds_otherwise_are_told_nothing(job: Any) -> None:
    assert job(2, steps, lambda rank: 0.05, lambda rank: 0.3 + 2.0**-20 * rank) == [[], []]


def test_as_an_error_all_ranks_raise_it(job: Any) -> None:
    def check(steps: Any) -> str:
        with pytest.raises(Exception, match="different hyper-parameters") as error:
            steps(lambda rank: 0.05 + 0.05 * rank, lambda rank: 0.0)
        return str(error.value)

    for text in job(2, check, steps, env={"HOROVOD_CHECK": "error"}):
        assert "lr: 0.05" in text
