"""Seven loops in which gradients used to be wrong in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd
from loops.harness import Table
from loops.pytorch import TorchSide, network

TABLE: Table[TorchSide] = Table("seven")
clip = nn.utils.clip_grad_norm_
STEPS = 4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: Any, side: TorchSide, step: int) -> torch.Tensor:
    x, y = side.batch(step)
    return functional.cross_entropy(model(x), y)


@TABLE.loop()
def a_parameter_is_replaced_in_its_group(side: TorchSide) -> nn.Module:
    """As splatting does when it makes more points."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
            optimizer.param_groups[0]["params"][2] = model[2].weight
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop()
def unfrozen_after_zero_grad_at_the_end_of_the_step(side: TorchSide) -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            model[0].requires_grad_(True)
        loss(model, side, step).backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@TABLE.loop()
def two_losses_on_separate_parts_with_a_clip_after_each(side: TorchSide) -> nn.Module:
    """An actor and a critic in one optimizer."""
    model = nn.ModuleList([network(1), network(2)])
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in model:
            loss(part, side, step).backward()
            clip(part.parameters(), 0.01)
        optimizer.step()
    return model


@TABLE.loop()
def data_clamped_with_an_unused_parameter(side: TorchSide) -> nn.Module:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.001, 0.001)
        optimizer.step()
    return model


@TABLE.loop()
def zeroed_through_data(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        loss(model, side, step).backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
    return model


@TABLE.loop()
def sums_with_a_change_between_two_passes(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, op=hvd.Sum)
    for step in range(0, STEPS, 2):
        for part in (0, 1):
            (loss(model, side, step + part) / (side.size if side.distributed else 1)).backward()
            clip(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return model


@TABLE.loop()
def a_second_optimizer_over_the_same_parameters(side: TorchSide) -> nn.Module:
    """Adam first and SGD later, of which only the first is in use."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    later = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
    del later
    return model
