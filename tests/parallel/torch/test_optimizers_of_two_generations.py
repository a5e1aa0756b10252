"""Optimizers over like parameters, made before and after a shutdown, on real ranks."""

from __future__ import annotations

from typing import Any

import torch

import horovod.torch as hvd


def test_an_optimizer_from_before_a_restart_does_not_mix_with_a_new_one(job: Any) -> None:
    """One was made before the runtime was restarted, the other after; they train models of the same shape."""

    def check() -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        first = hvd.DistributedOptimizer(torch.optim.SGD(parameters[:1], lr=1.0))
        hvd.shutdown()
        hvd.init()
        second = hvd.DistributedOptimizer(torch.optim.SGD(parameters[1:], lr=1.0))
        order = (0, 1) if hvd.rank() == 0 else (1, 0)
        for which in order:
            (parameters[which] * (hvd.rank() + 1) * (which + 1)).sum().backward()
        first.step()
        second.step()
        return [parameter.item() for parameter in parameters]

    assert job(2, check) == [[-1.5, -3.0]] * 2


def test_an_optimizer_that_only_one_rank_still_has_takes_no_name(job: Any) -> None:
    """As one that only one rank's garbage collector has not freed."""

    def check() -> list[float]:
        kept = [hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))]
        if hvd.rank() == 1:
            kept.clear()
        hvd.shutdown()
        hvd.init()
        pair = [torch.nn.Parameter(torch.zeros(2 + number)) for number in range(2)]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([each], lr=1.0)) for each in pair]
        pair[hvd.rank()].sum().backward()  # so each rank looks for the optimizer that the other names
        for optimizer in optimizers:
            optimizer.step()
        parameter = torch.nn.Parameter(torch.zeros(1))
        like_the_kept = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        (parameter * (hvd.rank() + 1)).sum().backward()
        like_the_kept.step()
        return [parameter.item()]

    assert job(2, check) == [[-1.5]] * 2
