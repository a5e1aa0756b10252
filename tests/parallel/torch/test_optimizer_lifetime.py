"""An optimizer that was dropped, and one whose scheduler was made before it was wrapped, on real ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import horovod.torch as hvd


def test_a_second_optimizer_reduces_after_the_first_was_dropped(job: Any) -> None:
    def check() -> list[float]:
        import gc

        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
                optimizer.step()
            del optimizer
            gc.collect()
        return model.weight[0].tolist()

    assert job(2, check) == [[-9.0, -9.0]] * 2


def test_a_scheduler_of_the_original_does_not_complain(job: Any) -> None:
    def check() -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                parameter.sum().backward()
                optimizer.step()
                scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert job(2, check) == [0.25, 0.25]
