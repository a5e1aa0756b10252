"""HOROVOD_DEBUG finds usual mistakes of a training loop, and says where they are."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from log_messages import LogMessages, line_of

DEBUG = {"HOROVOD_DEBUG": "1", "HOROVOD_DEBUG_STEPS": "4"}


def train(mistake: str, steps: int = 9) -> list[str]:
    """Train with one mistake; what this rank has told."""
    torch.manual_seed(hvd.rank() if mistake != "data" else 0)
    data = torch.rand(48, 4)
    dataset = torch.utils.data.TensorDataset(data)
    seed = hvd.rank() if mistake == "sampler" else 0
    sampler: Any = torch.utils.data.DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=seed)
    if mistake in ("data", "some data"):
        sampler = None
    if mistake == "some data":
        torch.manual_seed(hvd.rank() // 2)
        dataset = torch.utils.data.TensorDataset(torch.rand(48, 4))
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, sampler=sampler)
    with LogMessages() as lines:
        for step, (batch,) in enumerate(loader):
            if step == steps:
                break
            optimizer.zero_grad()
            loss = model(batch).sum()
            if mistake == "gradient" and hvd.rank() == 1 and step == 5:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            if mistake == "drift" and hvd.rank() == 1 and step == 4:
                with torch.no_grad():
                    model.bias[1] += 1e-6
    return lines


@pytest.mark.parametrize("env", [DEBUG, {}])
def test_a_right_loop_is_told_nothing(job: Any, env: dict[str, str]) -> None:
    assert job(2, train, "none", env=env) == [[], []]


def test_without_it_nothing_is_looked_for(job: Any) -> None:
    assert job(2, train, "data") == [[], []]


def test_a_gradient_that_is_not_finite_is_told_by_its_rank(job: Any) -> None:
    first, (told,) = job(2, train, "gradient", 6, env=DEBUG)
    assert not first
    assert told.startswith("rank 1: the gradient of 'bias' is not finite in step 6 of the optimizer made at ")
    assert f":{line_of(train, 'hvd.DistributedOptimizer(')}: of 2 elements 2 are NaN and 0 are infinite." in told


def test_parameters_that_drift_apart_are_told_with_what_each_rank_has(job: Any) -> None:
    (told,), other = job(2, train, "drift", env=DEBUG)
    assert not other
    assert re.search(
        rf"drifted apart after a step \(of the optimizer made at .*:{line_of(train, 'hvd.DistributedOptimizer(')}\): "
        r"bias: [0-9a-f]{12} on rank 0, [0-9a-f]{12} on rank 1\. ",
        told,
    )


def test_equal_batches_on_all_ranks_are_told_with_the_line_of_the_loop(job: Any) -> None:
    (told,), other = job(2, train, "data", env=DEBUG)
    assert not other
    assert told.startswith("ranks 0, 1 have loaded the same batches in the first 3 steps, at ")
    assert f":{line_of(train, 'enumerate(loader)')} on rank 0" in told


def test_equal_batches_on_some_ranks_are_told_by_the_first_of_each(job: Any) -> None:
    told = job(4, train, "some data", env=DEBUG)
    assert [len(each) for each in told] == [1, 0, 1, 0]
    assert told[2][0].startswith("ranks 2, 3 have loaded the same batches")


def test_samplers_with_different_seeds_are_told(job: Any) -> None:
    (told,), other = job(2, train, "sampler", env=DEBUG)
    assert not other
    assert "draw with different seeds or epochs" in told
    assert "sampler: seed 0, epoch 0 on rank 0, seed 1, epoch 0 on rank 1" in told


def only_rank_0() -> list[str]:
    """Rank 0 submits what the other rank submits later, elsewhere."""
    with LogMessages() as lines:
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="loss")
        told = [*lines]
        if hvd.rank() == 0:
            hvd.synchronize(handle)
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(2), name="loss")
    return told


def test_a_collective_that_only_one_rank_calls_is_told_before_it_waits(job: Any) -> None:
    (told,), other = job(2, only_rank_0, env=DEBUG)
    assert not other
    source, first = inspect.getsourcelines(only_rank_0)
    line = first + next(number for number, text in enumerate(source) if "allreduce_async" in text)
    assert told.startswith(f"rank 0 submits 'allreduce.loss' at {__file__}:{line}, and {__file__}:{line} is inside ")
    assert f"`if hvd.rank() == 0` (line {line - 1})" in told
