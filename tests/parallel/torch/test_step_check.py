"""What must be the same on all ranks is compared: a difference is said once, in words, on rank 0; or it is an error on all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import network

WIDTH = 6


def train(rates: list[float], momentum: float = 0.0, broadcast: bool = True) -> list[str]:
    """Train with one learning rate a step; returns the warnings."""
    model = network()
    if not broadcast:
        with torch.no_grad():
            model[0].weight.add_(hvd.rank())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
    return [str(each.message) for each in caught]


def test_ranks_that_are_alike_hear_nothing(job: Any) -> None:
    assert job(2, train, [0.1, 0.05, 0.01]) == [[], []]


def test_a_learning_rate_that_differs_is_said_once_with_both_values(job: Any) -> None:
    def check() -> list[str]:
        return train([0.1, 0.1, 0.1 / (1 + hvd.rank()), 0.1 / (1 + hvd.rank())])

    (text,), nothing = job(2, check)
    assert not nothing
    assert "lr of group 0: 0.1 on rank 0, 0.05 on rank 1" in text and "ReduceLROnPlateau" in text
    assert "test_step_check.py" in text and "HOROVOD_CHECK=error" in text


def test_parameters_that_were_not_broadcast_are_said_at_the_first_step(job: Any) -> None:
    (text,), nothing = job(2, train, [0.1, 0.1], 0.0, False)
    assert not nothing and "0.weight: [" in text and "hvd.broadcast_parameters" in text


@pytest.mark.parametrize("stepped", [False, True])
def test_what_steps_round_otherwise_is_no_difference_at_the_first_step_of_a_later_optimizer(
    job: Any, stepped: bool
) -> None:
    def check(apart: float) -> list[str]:
        model = network()
        told = []
        for first in (True, False) if stepped else (False,):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
            if not first:
                with torch.no_grad():
                    model[0].weight.mul_(1 + hvd.rank() * apart)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
            told += [str(each.message) for each in caught]
        return told

    rounded = job(2, check, 2.0**-21)
    assert [len(each) for each in rounded] == [0 if stepped else 1, 0]
    (text,), nothing = job(2, check, 0.01)
    assert not nothing and "0.weight: [" in text and "before the first step" in text


def test_what_ranks_were_told_before_a_join_decides_nothing_after_it(job: Any) -> None:
    """Only those that had not joined were told: they compare the same as the others again."""

    def check() -> list[int]:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(sgd, model.named_parameters())

        def step(rate: float) -> int:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
            return len(caught)

        apart = 0.1 * (1 + hvd.rank())
        told = [0 if hvd.rank() == 2 else step(apart)]
        hvd.join()
        return told + [step(rate) for rate in (0.1, 0.1, apart, apart)]

    assert job(3, check) == [[1, 0, 0, 1, 0], [0] * 5, [0] * 5]


def test_a_difference_can_be_an_error_or_be_passed_over(job: Any) -> None:
    def check() -> str:
        try:
            assert train([0.1 * (1 + hvd.rank())], momentum=0.9) == []
        except hvd.HorovodInternalError as error:
            return str(error)
        return ""

    for text in job(2, check, env={"HOROVOD_CHECK": "error"}):
        assert "lr of group 0: 0.1 on rank 0, 0.2 on rank 1" in text
    assert job(2, check, env={"HOROVOD_CHECK": "off"}) == ["", ""]


def test_a_parameter_that_no_optimizer_has_is_named(job: Any) -> None:
    def check() -> list[str]:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
        return [str(each.message) for each in caught]

    for (text,) in job(2, check):
        assert "'1.weight' has a gradient, but belongs to no DistributedOptimizer" in text


def test_nothing_is_said_where_another_optimizer_has_the_rest(job: Any) -> None:
    def check() -> list[str]:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), model.named_parameters())
            for part in model
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, WIDTH)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [str(each.message) for each in caught]

    assert job(2, check) == [[], []]


@pytest.mark.parametrize("groups", [1, 40])
def test_every_group_is_looked_at_in_turns(job: Any, groups: int) -> None:
    def check() -> int:
        parameters = [nn.Parameter(torch.zeros(1)) for _ in range(groups)]
        sgd = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd)
        optimizer.param_groups[-1]["weight_decay"] = 0.1 * hvd.rank()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                torch.stack(list(parameters)).sum().backward()
                optimizer.step()
        return len(caught)

    assert job(2, check) == [1, 0]
