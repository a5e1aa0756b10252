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

    assert job(2, check, timeout=20) == [[-1.5, -3.0]] * 2
