"""Loops in which a backward pass reaches only a part of the parameters: optimizers must leave the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loops.harness import Table
from loops.pytorch import CLASSES, STEPS, TorchSide, clip, loss, mean, network, sgd

TABLE: Table[TorchSide] = Table("unused")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "weight_decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
}


class Heads(nn.Module):
    """A trunk with several heads."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.trunk = network(1)
        torch.manual_seed(2)
        self.heads = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(heads))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        found: torch.Tensor = self.heads[head](self.trunk(x))
        return found


def heads_in_turns(side: TorchSide, make: Callable[..., torch.optim.Optimizer]) -> nn.Module:
    model = Heads()
    optimizer = side.wrap(make(model.parameters()), model)
    for step in range(5):
        x, y = side.batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x, step % 2), y).backward()
        optimizer.step()
    return model


def a_head_for_each_rank(side: TorchSide, make: Callable[..., torch.optim.Optimizer]) -> nn.Module:
    model = Heads()
    optimizer = side.wrap(make(model.parameters()), model)
    for step in range(5):
        optimizer.zero_grad()
        mean(
            functional.cross_entropy(model(each, (step * rank) % 3), of) for rank, each, of in side.ranks(step)
        ).backward()
        optimizer.step()
    return model


for _name, _make in OPTIMIZERS.items():
    TABLE.add(f"heads_in_turns_{_name}", partial(heads_in_turns, make=_make), part=_name in ("adam", "momentum"))
    TABLE.add(f"a_head_for_each_rank_{_name}", partial(a_head_for_each_rank, make=_make), part=_name == "adamw")


@TABLE.loop()
def stochastic_depth(side: TorchSide) -> nn.Module:
    """Each rank skips blocks by its own random numbers."""
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))
    first = network(2)
    both = nn.ModuleList([first, model])
    optimizer = side.wrap(torch.optim.Adam(both.parameters(), lr=0.01), both)

    def forward(x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = first(x)
        kept = torch.rand(4, generator=torch.Generator().manual_seed(31 * rank + step)) < 0.5
        for block, keep in zip(model, kept, strict=True):
            x = x + block(x).tanh() if keep else x
        return x

    for step in range(6):
        optimizer.zero_grad()
        mean(functional.cross_entropy(forward(each, rank, step), of) for rank, each, of in side.ranks(step)).backward()
        optimizer.step()
    return both


@TABLE.loop()
def a_lazily_applied_penalty(side: TorchSide) -> nn.Module:
    """StyleGAN's lazy regularization: every other step has a second loss, over parameters that the first does not reach."""
    model = nn.ModuleList([network(1), network(2)])
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(6):
        optimizer.zero_grad()
        loss(model[0], side, step).backward()
        optimizer.step()
        if step % 2 == 0:
            optimizer.zero_grad()
            (2 * model[1](side.rows(step)).square().mean()).backward()
            optimizer.step()
    return model


@TABLE.loop(
    refused="Ranks reduce gradients of .* at different steps: rank 0 is in pass 2 of step 1, ranks? 1.* in pass 1 of step 2"
)
def a_penalty_of_one_rank(side: TorchSide) -> nn.Module:
    """One rank alone has a penalty, in a pass of its own."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        if side.rank == 0:
            scale = 1.0 if side.distributed else 1 / side.size
            (scale * model[0].weight.square().sum()).backward()
        optimizer.step()
    return model


@TABLE.loop()
def never_used_with_weight_decay(side: TorchSide) -> nn.Module:
    model = Heads()
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5), model)
    for step in range(STEPS):
        x, y = side.batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x, 0), y).backward()
        optimizer.step()
    assert model.heads[1].weight.grad is None
    return model


@TABLE.loop()
def unused_with_zeros_of_old(side: TorchSide) -> nn.Module:
    """zero_grad(set_to_none=False): momentum moves what is not used, as on one process."""
    model = Heads(2)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(5):
        x, y = side.batch(step)
        optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(model(x, int(step == 1)), y).backward()
        optimizer.step()
    return model


@TABLE.loop()
def tasks_one_pass_each(side: TorchSide) -> nn.Module:
    """Multi-task: a pass for each head, with a clip at the end."""
    model = Heads()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        x, y = side.batch(step)
        optimizer.zero_grad()
        for head in range(1 + step % 3):
            functional.cross_entropy(model(x, head), y).backward()
        clip([each for each in model.parameters() if each.grad is not None], 0.1)
        optimizer.step()
    return model


@TABLE.loop(part=False)
def ranks_without_a_loss(side: TorchSide) -> nn.Module:
    """A rank whose batch has nothing of interest makes no backward pass, only the step."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, each, of in side.ranks(step):
            if (rank + step) % 2:
                scale = 1.0 if side.distributed else 1 / side.size
                (scale * functional.cross_entropy(model(each), of)).backward()
        clip(model.parameters(), 1e9)
        optimizer.step()
    return model


@TABLE.loop(part=False)
def a_step_without_any_loss(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(5):
        optimizer.zero_grad()
        if step != 2:
            loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop()
def an_expert_for_some_rows(side: TorchSide) -> nn.Module:
    """A mixture of experts: which experts a rank's rows reach depends on its data."""
    torch.manual_seed(1)
    experts = nn.ModuleList(network(seed) for seed in range(4))
    optimizer = side.wrap(torch.optim.Adam(experts.parameters(), lr=0.01), experts)
    for step in range(5):
        x, y = side.batch(step)
        chosen = (x.sum(1).abs() * 2).long().clamp(max=3)
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, expert in enumerate(experts):
            rows = chosen == number
            if rows.any():
                total = total + functional.cross_entropy(expert(x[rows]), y[rows], reduction="sum")
        (total / len(x)).backward()
        optimizer.step()
    return experts


@TABLE.loop(part=False)
def a_pass_that_reaches_nothing_of_the_optimizer(side: TorchSide) -> Iterator[Any]:
    model, other = network(1), nn.Parameter(torch.ones(6))
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (side.rows(step) @ other).mean().backward()
        loss(model, side, step).backward()
        optimizer.step()
    yield from model.parameters()
