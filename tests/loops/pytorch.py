"""The side of PyTorch's loops: data, networks and optimizers, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import horovod.torch as hvd
from loops.harness import Outcome, Side, outcome

clip = nn.utils.clip_grad_norm_
STEPS = 4
TIGHT = 0.01
"""A norm that every gradient of these networks is clipped to."""

ROWS = 4
"""Rows of each rank in a batch."""
WIDTH, CLASSES = 6, 3


class TorchSide(Side):
    """What PyTorch's loops are given."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **wrapping: Any) -> Any:
        """The optimizer; on a rank the distributed one."""
        if not self.distributed:
            return optimizer
        names = model.named_parameters() if model is not None else None
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, **wrapping)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and classes of one step."""
        return self.rows(step), self.share(
            _drawn(step, 1, lambda g: torch.randint(CLASSES, (ROWS * self.size,), generator=g))
        )

    def ranks(self, step: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The batch of each rank that this side stands for: rank, inputs and classes."""
        for rank in [self.rank] if self.distributed else range(self.size):
            yield rank, *TorchSide(rank, self.size, True).batch(step)

    def rows(self, step: int, width: int = WIDTH) -> torch.Tensor:
        """Inputs of one step."""
        return self.share(_drawn(step, 2, lambda g: torch.randn(ROWS * self.size, width, generator=g)))  # type: ignore[no-any-return]


def _drawn(step: int, what: int, draw: Callable[[torch.Generator], torch.Tensor]) -> torch.Tensor:
    return draw(torch.Generator().manual_seed(1000 * step + what))


def network(seed: int = 1, width: int = WIDTH, classes: int = CLASSES) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: Any, side: TorchSide, step: int) -> torch.Tensor:
    x, y = side.batch(step)
    return functional.cross_entropy(model(x), y)


def mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of what the parts of a side give."""
    return torch.stack([*values]).mean()


def values_of(parts: nn.Module | Iterable[torch.Tensor]) -> Iterator[Any]:
    """The values of a model's parameters, or of tensors, for the harness."""
    for tensor in parts.parameters() if isinstance(parts, nn.Module) else parts:
        yield tensor.detach().numpy()


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def rounding_otherwise() -> Iterator[None]:
    """A block in which this process computes as another kind of processor: what the script has made of gradients, and what
    steps make of parameters, differs in the last bits."""
    generator = torch.Generator().manual_seed(1)

    def rounded(tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.layout is torch.strided:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data.mul_((1 + 2 * torch.finfo(tensor.dtype).eps * noise).to(tensor.dtype))

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rounded(parameter.grad)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rounded(parameter)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def both_sides(train: Callable[[TorchSide], Any]) -> tuple[Outcome | None, Outcome]:
    """Run a loop on this rank, and on rank 0 alone as well, before."""
    rank, size = hvd.rank(), hvd.size()

    def loop(side: TorchSide) -> Iterator[Any]:
        return values_of(train(side))

    with in_float64():
        alone = outcome(loop, TorchSide(0, size, False)) if rank == 0 else None
        return alone, outcome(loop, TorchSide(rank, size, True), end=hvd.shutdown)
