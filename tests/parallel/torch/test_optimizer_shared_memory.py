"""Gradients whose memory others use, that of another parameter or of what backward still reads, are copied; no others are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod._base.config import BUCKET_BYTES
from horovod.torch.storage_references import ALONE_IN_HOOKS, AVAILABLE
from jobs import Job

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch does not count references to memory")


class Slow(torch.autograd.Function):
    """The identity; its gradient takes long."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.1)
        return gradient


class Model(nn.Module):
    """Backward gives ``first`` and ``second`` gradients that are views of one tensor, which ``layer`` needs later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 5)
        self.first, self.second = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Slow.apply(self.layer(x)) + self.first.unsqueeze(0)
        return y + self.second.unsqueeze(0)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(distributed: bool, compression: Any) -> tuple[list[torch.Tensor], bool]:
    """The parameters, and whether the two gradients shared memory when backward had ended."""
    model = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    ranks = [hvd.rank()] if distributed else range(hvd.size())
    shared = False
    for step in range(3):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().sum() / len(ranks) for rank in ranks).backward()
        first, second = model.first.grad, model.second.grad
        shared = first is not None and second is not None and first.data_ptr() == second.data_ptr()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], shared


@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"], ids=["alone", "together"])
@pytest.mark.parametrize("compression", ["none", "fp16", "powersgd"])
def test_gradients_that_share_memory_train_as_in_one_process(job: Job, compression: str, bucket_bytes: str) -> None:
    def check() -> None:
        kinds = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "powersgd": hvd.Compression.powersgd(5)}
        found, shared = train(True, kinds[compression])
        wanted, _ = train(False, None)
        assert shared, "backward no longer gives such gradients"
        rough = {"none": 1e-6, "fp16": 1e-2, "powersgd": 1e-3}[compression]
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert torch.allclose(one, other, rtol=rough, atol=rough), (number, one, other)

    job(2, check, env={BUCKET_BYTES: bucket_bytes})


@pytest.mark.skipif(not ALONE_IN_HOOKS, reason="this PyTorch lets no gradient be alone in its hook")
def test_gradients_whose_memory_nobody_else_uses_are_reduced_where_they_are(job: Job) -> None:
    def check() -> None:
        copied = 0
        tensors: Any = torch.Tensor
        clone = tensors.clone

        def note(tensor: torch.Tensor, **options: Any) -> Any:
            nonlocal copied
            copied += 1
            return clone(tensor, **options)

        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
        tensors.clone = note
        try:
            for step in range(3):
                optimizer.zero_grad(set_to_none=step != 1)
                model(batch(step, hvd.rank())).square().sum().backward()
                optimizer.step()
        finally:
            tensors.clone = clone
        assert not copied

    job(2, check)
