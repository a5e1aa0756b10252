"""Random training programs as data, and what runs one: on ranks with distributed optimizers, and in one process without.

A program has one or two optimizers over three parts of a model. In each pass every rank uses parts of its own. In one process a
pass is that of all ranks together, so the gradients are the same where the rule holds. A rank may make no pass in a step of
one pass. Where ranks make different numbers of passes otherwise, or count the passes of a window differently because these
reach different optimizers, they are refused by name, so that is not drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd
from loops.pytorch import TorchSide

PARTS = 3
CHANGES = ("", "", "clip", "halve", "replace", "data")
ZEROING = ("none", "zeros", "model", "end", "never")


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        used: for each rank, the parts that its loss uses; none: it makes no pass.
        local: whether it is inside ``no_sync()``.
        change: what the script does to the gradients afterwards.
    """

    used: tuple[tuple[int, ...], ...]
    local: bool
    change: str


@dataclass(frozen=True)
class Program:
    """A training loop.

    Attributes:
        owners: for each part, the number of its optimizer.
        kinds: for each optimizer, its class.
        total: whether gradients are summed, not averaged.
        window: ``backward_passes_per_step``.
        zeroing: how gradients are zeroed.
        steps: the passes of each step.
        frozen: for each step, a part that is frozen in it, or -1.
        inside: whether each parameter has an optimizer of its own, which steps in a hook inside the last pass of each step:
            "wrapped": it is made distributed before the hook is registered; "hooked": afterwards.
    """

    seed: int
    owners: tuple[int, ...]
    kinds: tuple[str, ...]
    total: bool
    window: int
    zeroing: str
    steps: tuple[tuple[Pass, ...], ...]
    frozen: tuple[int, ...]
    inside: str


def draw(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    optimizers = choose.choice((1, 1, 2))
    owners = (0, choose.randrange(optimizers), optimizers - 1)
    window = choose.choice((1, 1, 1, 2))
    local = choose.random() < 0.3
    alike = choose.random() < 0.5 or (window > 1 and optimizers > 1)
    total = choose.random() < 0.3
    changes = [
        change for change in CHANGES if not (total and change == "replace")
    ]  # which is refused, without zero_grad()
    skips = window == 1 and not local and choose.random() < 0.2
    frozen = tuple(choose.choice((-1, -1, -1, *range(PARTS))) for _ in range(4))
    steps = []
    for still in frozen:
        passes = []
        for number in range(count := 1 if skips else choose.choice((1, 1, 2, 3))):
            first = _parts(choose, still)
            used = tuple(first if alike else _parts(choose, still, skips) for _ in range(ranks))
            keep = local and number < count - 1
            open_window = window > 1 or keep or any(not each for each in used) or (local and optimizers > 1)
            passes.append(Pass(used, keep, "" if open_window else choose.choice(changes)))
        steps.append(tuple(passes))
    kinds = tuple(choose.choice(("momentum", "adam", "decay")) for _ in range(optimizers))
    zeroing = choose.choice(ZEROING)
    may_step_inside = alike and not local and not skips and window == 1
    inside = choose.choice(("", "", "wrapped", "hooked")) if may_step_inside else ""
    return Program(seed, owners, kinds, total, window, zeroing, tuple(steps), frozen, inside)


def _parts(choose: random.Random, frozen: int, empty: bool = False) -> tuple[int, ...]:
    """Some parts, not the frozen one alone, which would make no pass."""
    found = tuple(sorted(choose.sample(range(PARTS), choose.randrange(0 if empty else 1, PARTS + 1))))
    return tuple(range(PARTS)) if found == (frozen,) else found


def run(program: Program, side: TorchSide) -> Iterator[torch.Tensor]:
    """Train; the parameters."""
    torch.manual_seed(program.seed)
    model = nn.ModuleList(nn.Linear(4, 2) for _ in range(PARTS))
    stepping = _SteppingInside(program, model, side) if program.inside else None
    optimizers = (
        [*stepping.optimizers.values()]
        if stepping
        else [_optimizer(program, number, model, side) for number in range(len(program.kinds))]
    )
    for number, (passes, frozen) in enumerate(zip(program.steps, program.frozen, strict=True)):
        for index, part in enumerate(model):
            part.requires_grad_(index != frozen)
        _zero(program.zeroing, model, optimizers)
        for index, each in enumerate(passes):
            blocks = [o.no_sync() if each.local and side.distributed else nullcontext() for o in optimizers]
            for block in blocks:
                block.__enter__()
            if stepping:
                stepping.begin(index == len(passes) - 1)
            loss = _loss(program, each, model, side, 10 * number + index)
            if loss is not None and loss.requires_grad:
                loss.backward()
            for block in blocks:
                block.__exit__(None, None, None)
            _change(each.change, model)
        for optimizer in optimizers:
            if not stepping or optimizer not in stepping.done:
                optimizer.step()
        if program.zeroing == "end":
            _zero("none", model, optimizers)
    yield from model.parameters()


class _SteppingInside:
    """An optimizer for each parameter, whose hook steps inside a pass."""

    def __init__(self, program: Program, model: nn.ModuleList, side: TorchSide) -> None:
        self.optimizers: dict[torch.Tensor, Any] = {}
        self.done: list[Any] = []
        self._steps = False
        for name, parameter in model.named_parameters():
            number = program.owners[int(name[0])]
            made = _plain(program.kinds[number], [parameter])
            if program.inside == "hooked":
                self._hook(parameter)
            self.optimizers[parameter] = _wrapped(program, made, [(name, parameter)]) if side.distributed else made
            if program.inside == "wrapped":
                self._hook(parameter)

    def begin(self, last: bool) -> None:
        """Begin a pass, which steps if it is the last one of its step."""
        self._steps = last
        self.done.clear()

    def _hook(self, parameter: torch.Tensor) -> None:
        def step(parameter: torch.Tensor) -> None:
            if self._steps:
                self.optimizers[parameter].step()
                self.optimizers[parameter].zero_grad()
                self.done.append(self.optimizers[parameter])

        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[attr-defined]  # PyTorch does not type it


def _optimizer(program: Program, number: int, model: nn.ModuleList, side: TorchSide) -> Any:
    owned = [(name, p) for name, p in model.named_parameters() if program.owners[int(name[0])] == number]
    plain = _plain(program.kinds[number], [p for _, p in owned])
    return _wrapped(program, plain, owned) if side.distributed else plain


def _plain(kind: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.02)
    if kind == "decay":
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _wrapped(program: Program, plain: torch.optim.Optimizer, owned: list[tuple[str, Any]]) -> Any:
    return hvd.DistributedOptimizer(
        plain, owned, op=hvd.Sum if program.total else hvd.Average, backward_passes_per_step=program.window
    )


def _zero(how: str, model: nn.ModuleList, optimizers: list[Any]) -> None:
    if how == "model":
        model.zero_grad(set_to_none=False)
    for optimizer in optimizers if how in ("none", "zeros") else ():
        optimizer.zero_grad(set_to_none=how == "none")


def _loss(program: Program, each: Pass, model: nn.ModuleList, side: TorchSide, salt: int) -> torch.Tensor | None:
    """This side's loss; in one process that of all ranks."""
    terms = []
    for rank, used in enumerate(each.used):
        if side.distributed and rank != side.rank:
            continue
        draws = torch.Generator().manual_seed(1000 * program.seed + 10 * salt + rank)
        x = torch.randn(3, 4, generator=draws)
        terms += [(model[part](x) - rank).square().mean() * (part + 1) for part in used]
    if not terms:
        return None
    ranks = 1 if program.total or side.distributed else side.size
    return torch.stack(terms).sum() / ranks


def _change(what: str, model: nn.ModuleList) -> None:
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if what == "halve":
            gradient.mul_(0.5)
        elif what == "replace":
            parameter.grad = gradient.clamp(-0.3, 0.3)
        elif what == "data":
            gradient.data.clamp_(-0.3, 0.3)
