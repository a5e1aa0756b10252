"""A small regression that ranks must solve together as one process would on all their batches.

Every rank trains on its part of each batch and, without Horovod, on the whole of it; the parameters must agree to float32
rounding, and be the same bits on all ranks. Runs inside ranks, between ``init()`` and ``shutdown()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd

BATCH = 4
Batch = tuple[torch.Tensor, torch.Tensor]
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-4),
}


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(steps: int, size: int, rank: int | None = None) -> Iterator[Batch]:
    """The batches of one rank, or of all together."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, y = torch.randn(size * BATCH, 6, generator=generator), torch.randn(size * BATCH, 3, generator=generator)
        part = slice(None) if rank is None else slice(rank * BATCH, (rank + 1) * BATCH)
        yield x[part], y[part]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: Any, data: Iterator[Batch]) -> nn.Module:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def scaled(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    """Train with a gradient scaler, for :func:`assert_as_alone`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


def alone(maker: str, steps: int, size: int) -> nn.Module:
    """The network after a training in one process."""
    model = network()
    return train(model, MAKERS[maker](model.parameters()), batches(steps, size))


def assert_close(found: nn.Module, wanted: nn.Module, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for (name, one), two in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=rtol, atol=atol), (name, (one - two).abs().max())


def assert_same_on_all_ranks(model: nn.Module) -> None:
    bits = b"".join(
        parameter.detach().contiguous().view(torch.uint8).numpy().tobytes() for parameter in model.parameters()
    )
    assert hvd.allgather_object(bits).count(bits) == hvd.size()


def assert_as_alone(
    run: Callable[[nn.Module, Any, list[Batch], bool], None],
    maker: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    build: Callable[[], nn.Module] = network,
    **wrapping: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train distributed and alone; they must agree. Returns both models.

    Args:
        run: ``run(model, optimizer, batches, distributed)`` trains; called once with the wrapped optimizer and this rank's
            batches, once with a plain one and all of them.
        wrapping: keywords for ``DistributedOptimizer``.
    """
    model, wanted = build(), build()
    optimizer = hvd.DistributedOptimizer(maker(model.parameters()), model.named_parameters(), **wrapping)
    run(model, optimizer, list(batches(steps, hvd.size(), hvd.rank())), True)
    run(wanted, maker(wanted.parameters()), list(batches(steps, hvd.size())), False)
    assert_close(model, wanted)
    assert_same_on_all_ranks(model)
    return model, wanted
