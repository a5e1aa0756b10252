"""Loops that change gradients between backward and the step, and that zero them in every way, or never."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from loops.harness import Table
from loops.pytorch import STEPS, TIGHT, TorchSide, clip, loss, mean, network, sgd

TABLE: Table[TorchSide] = Table("changes")


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.01, 0.01)


def _clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-0.01, 0.01)


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def _replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)


def _remove_nan(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.nan_to_num(parameter.grad.sign(), nan=0, out=parameter.grad)


def _normalize(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= parameter.grad.norm() + 1e-3


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "clip": lambda model: clip(model.parameters(), TIGHT),
    "clip_value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "clamp": _clamp,
    "clamp_of_data": _clamp_data,
    "replacement": _replace,
    "replacement_of_data": _replace_data,
    "sign": _remove_nan,
    "normalization": _normalize,
}


def changed_after_each_pass(side: TorchSide, change: Callable[[nn.Module], Any]) -> nn.Module:
    """Three passes a step, each with a change that is no linear function; the last reaches only a part."""
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, side, 2 * step + part).backward()
            change(model)
        model[2](side.rows(step, 8)).square().mean().backward()
        change(model)
        optimizer.step()
    return model


for _name, _change in CHANGES.items():
    TABLE.add(
        f"{_name}_after_each_pass",
        partial(changed_after_each_pass, change=_change),
        part=_name in ("clip", "clamp_of_data", "replacement"),
    )


def _zero_one_by_one(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def _zeros_like(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _none(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _times_zero(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0


def _foreach(model: nn.Module, optimizer: Any) -> None:
    present = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if present:
        torch._foreach_zero_(present)


def _half(model: nn.Module, optimizer: Any) -> None:
    """Gradients decay instead: a momentum by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


ZEROING: dict[str, Callable[[nn.Module, Any], Any]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad_to_zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "the_models_zero_grad": lambda model, optimizer: model.zero_grad(),
    "the_models_zero_grad_to_zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "zero_": _zero_one_by_one,
    "zeros_like": _zeros_like,
    "none": _none,
    "times_zero": _times_zero,
    "foreach": _foreach,
    "half": _half,
    "nothing": lambda model, optimizer: None,
}


def zeroed_at_the_begin(side: TorchSide, zero: Callable[[nn.Module, Any], Any]) -> nn.Module:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(3):
        zero(model, optimizer)
        for part in range(2):
            loss(model, side, 2 * step + part).backward()
            clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


def zeroed_at_the_end(side: TorchSide, zero: Callable[[nn.Module, Any], Any]) -> nn.Module:
    model = network()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
        zero(model, optimizer)
    return model


for _name, _zero in ZEROING.items():
    _known = _name in ("zeros_like", "nothing", "the_models_zero_grad")
    TABLE.add(f"zeroed_by_{_name}", partial(zeroed_at_the_begin, zero=_zero), part=_known)
    TABLE.add(f"zeroed_at_the_end_by_{_name}", partial(zeroed_at_the_end, zero=_zero), part=_name in ("none", "half"))


@TABLE.loop()
def set_by_hand(side: TorchSide) -> nn.Module:
    """Gradients of torch.autograd.grad, which no hook hears of."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = torch.autograd.grad(loss(model, side, step), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


@TABLE.loop()
def some_set_by_hand(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model[2], _Narrow(side), step).backward()
        model[0].weight.grad = side.rows(step, 8).mean(0)[:, None].expand(8, 6).contiguous()
        optimizer.synchronize() if side.distributed else None
        clip(model.parameters(), TIGHT)
        if side.distributed:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return model


class _Narrow(TorchSide):
    """The same side with inputs for a hidden layer."""

    def __init__(self, side: TorchSide) -> None:
        super().__init__(side.rank, side.size, side.distributed)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(step, 8), super().batch(step)[1]


@TABLE.loop()
def conflicting_gradients_are_projected(side: TorchSide) -> nn.Module:
    """PCGrad: the gradients of two losses are taken after a pass each, and joined by hand."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = []
        for part in range(2):
            optimizer.zero_grad()
            loss(model, side, 2 * step + part).backward()
            found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.zero_grad()
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            conflict = (first * second).sum().clamp(max=0) / second.square().sum()
            parameter.grad = first - conflict * second + second
        optimizer.step()
    return model


@TABLE.loop(part=False)
def noise_is_added(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        optimizer.step()
    return model


@TABLE.loop(part=False)
def each_ranks_gradients_are_clipped_first(side: TorchSide) -> nn.Module:
    """Gradients of the parts are clipped one by one, then averaged: by hand, so they are set and not added by a pass."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = []
        for _, rows, of in side.ranks(step):
            copies = [
                torch.nn.Parameter(each)
                for each in torch.autograd.grad(nn.functional.cross_entropy(model(rows), of), [*model.parameters()])
            ]
            norm = torch.stack([each.detach().norm() for each in copies]).norm()
            found.append([each.detach() * (TIGHT / norm).clamp(max=1) for each in copies])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return model


@TABLE.loop(part=False)
def a_penalty_on_the_loss_of_each_part(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean(model(rows).mean().square() for _, rows, _ in side.ranks(step)).backward()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT, norm_type=float("inf"))
        optimizer.step()
    return model
