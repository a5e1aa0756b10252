"""Sequences of what scripts do to gradients that are not reduced yet, as data; what runs one, and which must be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

import horovod.torch as hvd
from loops.pytorch import TorchSide

PARAMETERS = 2


@dataclass(frozen=True)
class Backward:
    """A backward pass.

    Attributes:
        reached: the parameters that it reaches.
        kind: how backward makes a new gradient: it takes the tensor that it has computed ("taken"), it copies the tensor
            ("copied"), or it has added three tensors up ("added").
        quiet: whether it is inside ``no_sync()``.
    """

    reached: tuple[int, ...]
    kind: str
    quiet: bool


@dataclass(frozen=True)
class Look:
    """``torch.autograd.grad`` of a loss, which adds to no gradient."""

    reached: tuple[int, ...]


@dataclass(frozen=True)
class Discard:
    """``grad = None`` for some parameters."""

    reached: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """Change the gradients of some parameters: "in place", by a new tensor ("replaced"), or by a second new tensor, which may
    lie where the first gradient was ("replaced twice")."""

    reached: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Zero:
    """``optimizer.zero_grad()``."""

    set_to_none: bool


@dataclass(frozen=True)
class Step:
    """``optimizer.step()``."""


Action = Backward | Look | Discard | Change | Zero | Step


def must_be_refused(sequence: Sequence[Action], window: int) -> bool:
    """Whether the script changes a gradient between a pass that keeps it on this rank and its reduction."""
    local: set[int] = set()
    changed: set[int] = set()
    present: set[int] = set()
    passes = 0
    was_added_to = False  # a changed gradient
    for action in [*sequence, Step()]:
        match action:
            case Backward(reached, _, quiet):
                was_added_to |= bool(changed.intersection(reached))
                present.update(reached)
                passes += not quiet
                local.update(reached)
                if not quiet and passes == window:
                    if was_added_to or changed:
                        return True
                    local.clear()
                    passes = 0
            case Discard(reached):
                for held in (local, changed, present):
                    held.difference_update(reached)
            case Change(reached, _):
                changed |= local.intersection(reached)
            case Zero(set_to_none):
                was_added_to, passes = False, 0
                local.clear()
                changed.clear()
                if set_to_none:
                    present.clear()
            case Step():
                if was_added_to or changed:
                    return True
                local.clear()
                passes = 0
    return False


def trained(sequence: Sequence[Action], window: int, total: bool) -> Callable[[TorchSide], list[torch.nn.Parameter]]:
    """The loop of a sequence, which a step ends.

    Args:
        window: ``backward_passes_per_step``.
        total: whether gradients are summed, not averaged.
    """

    def loss(side: TorchSide, parameters: Sequence[torch.Tensor], action: Backward, number: int) -> torch.Tensor:
        terms = []
        for rank in [side.rank] if side.distributed else range(side.size):
            own = 1.0 + rank + 0.25 * number
            for index in action.reached:
                p = parameters[index]
                terms += [p.sum() * own] if action.kind != "taken" else []
                terms += [(p - own).square().sum()] if action.kind != "copied" else []
                terms += [(p * own).sum()] if action.kind == "added" else []
        return torch.stack(terms).sum() / (1 if total or side.distributed else side.size)

    def change(parameter: torch.Tensor, kind: str) -> None:
        if kind == "in place":
            parameter.grad.clamp_(-0.5, 0.7)
        for _ in range({"in place": 0, "replaced": 1, "replaced twice": 2}[kind]):
            parameter.grad = parameter.grad.clamp(-0.5, 0.7)

    def loop(side: TorchSide) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(torch.full((3,), 1.0 + index)) for index in range(PARAMETERS)]
        wrapping = {"backward_passes_per_step": window, "op": hvd.Sum if total else hvd.Average}
        optimizer = side.wrap(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **wrapping)
        for number, action in enumerate([*sequence, Step()]):
            match action:
                case Backward(_, _, quiet):
                    with optimizer.no_sync() if quiet and side.distributed else nullcontext():
                        loss(side, parameters, action, number).backward()
                case Look(reached):
                    again = loss(side, parameters, Backward(reached, "taken", True), number)
                    torch.autograd.grad(again, [parameters[index] for index in reached])
                case Discard(reached):
                    for index in reached:
                        parameters[index].grad = None
                case Change(reached, kind):
                    for index in reached:
                        if parameters[index].grad is not None:
                            change(parameters[index], kind)
                case Zero(set_to_none):
                    optimizer.zero_grad(set_to_none=set_to_none)
                case Step():
                    optimizer.step()
        return parameters

    return loop
