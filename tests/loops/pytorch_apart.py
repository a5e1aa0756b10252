"""Loops whose ranks come apart after the first step, which they are told within 50 steps; and loops that only look so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd
from loops.harness import Table
from loops.pytorch import STEPS, TIGHT, TorchSide, clip, loss, mean, network, sgd

TABLE: Table[TorchSide] = Table("apart")
FIRST = 3
"""The step in which ranks begin to differ."""
LONG = FIRST + 50
APART = r"(?!.*before the first step)(?=.*ranks?\b)(?=.*\bstep\b)(?=.*\d\.(weight|bias))"
"""What ranks are told: the step, the ranks and a parameter."""


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def changed_on_one_rank(
    side: TorchSide,
    change: Callable[[nn.Module, Any, TorchSide, int], Any],
    make: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    until: int = LONG,
) -> nn.Module:
    """Training in which each rank changes gradients or parameters in its own way, between backward and the step."""
    model = network()
    optimizer = side.wrap(make(model), model)
    for step in range(LONG):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        if FIRST <= step < until:
            change(model, optimizer, side, step)
        optimizer.step()
    return model


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    return (each.grad for each in model.parameters() if each.grad is not None)


def _divide(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """By the number of this rank's rows, as where a batch is filled up."""
    for gradient in _gradients(model):
        gradient /= 3 + side.rank


def _noise(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """Differential privacy with the global generator, which each rank seeds differently."""
    generator = torch.Generator().manual_seed(100 * side.rank + step)
    for gradient in _gradients(model):
        gradient += 0.01 * torch.randn(gradient.shape, generator=generator)


def _clip(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    if side.rank == 0:
        clip(model.parameters(), TIGHT)


def _drop_nan(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """A NaN reaches all ranks by the reduction; one removes it."""
    for gradient in _gradients(model):
        gradient.view(-1)[0] = float("nan")
        if side.rank == 0:
            torch.nan_to_num_(gradient)


def _load(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """A rank whose loss looks too large goes back to a checkpoint."""
    if side.rank == 0:
        model.load_state_dict(network(seed=5).state_dict())


def _reset_units(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """Units that this rank's rows do not use begin again: one row of a matrix."""
    unit = int(model[0](side.rows(step)).abs().mean(0).argmin())
    with torch.no_grad():
        model[0].weight[unit] = 0.1 * (1 + side.rank)


def _clear_state(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    if side.rank == 0:
        optimizer.state.clear()


def _write_over(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """DARTS: gradients of this rank alone are copied into those of the pass."""
    found = torch.autograd.grad(loss(model, side, step), [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        assert parameter.grad is not None
        parameter.grad.data.copy_(gradient.data)


def _weigh(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """MGDA: gradients are weighed by norms of this rank's own losses."""
    found = torch.autograd.grad(loss(model, side, step), [*model.parameters()])
    norm = torch.stack([each.norm() for each in found]).norm()
    for gradient in _gradients(model):
        gradient *= norm / (1 + norm)


def _move_average(model: nn.Module, optimizer: Any, side: TorchSide, step: int) -> None:
    """Lookahead by this rank's own loss."""
    with torch.no_grad():
        factor = 1 - 0.01 * float(loss(model, side, step).detach())
        for parameter in model.parameters():
            parameter *= factor


CHANGES = {
    "gradients_divided_by_each_ranks_count": _divide,
    "noise_of_each_rank": _noise,
    "a_clip_on_one_rank": _clip,
    "a_checkpoint_loaded_on_one_rank": _load,
    "gradients_written_over_by_each_ranks_own": _write_over,
    "gradients_weighed_by_each_ranks_losses": _weigh,
    "parameters_scaled_by_each_ranks_loss": _move_average,
}
for _name, _change in CHANGES.items():
    TABLE.add(_name, partial(changed_on_one_rank, change=_change), told=APART, part="weighed" not in _name)
_once = FIRST + 1
TABLE.add("noise_in_one_step", partial(changed_on_one_rank, change=_noise, until=_once), told=APART, part=False)
TABLE.add("units_reset_in_one_step", partial(changed_on_one_rank, change=_reset_units, until=_once), told=APART)
TABLE.add("nan_dropped_on_one_rank", partial(changed_on_one_rank, change=_drop_nan), told=APART)
TABLE.add(
    "the_optimizers_state_cleared_on_one_rank",
    partial(changed_on_one_rank, change=_clear_state, make=adam, until=_once),
    told=APART,
)


@TABLE.loop(told=APART)
def a_clip_where_a_rank_makes_no_pass(side: TorchSide) -> nn.Module:
    """The others clip reduced gradients; this rank's are reduced in its step, after its clip."""
    model = network()
    optimizer = side.wrap(momentum(model), model)
    for step in range(LONG):
        optimizer.zero_grad()
        if step < FIRST or side.rank != 1:
            loss(model, side, step).backward()
        clip([each for each in model.parameters() if each.grad is not None], TIGHT)
        optimizer.step()
    return model


def a_parameter_out_of_its_group(side: TorchSide, clipped: bool) -> nn.Module:
    """The parameter that was taken out still gets gradients, which are this rank's own."""
    model = network()
    optimizer = side.wrap(momentum(model), model)
    for step in range(LONG):
        if step == FIRST:
            del optimizer.param_groups[0]["params"][1]
        model.zero_grad()
        loss(model, side, step).backward()
        if clipped:
            clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


TABLE.add("a_parameter_out_of_its_group_clipped", partial(a_parameter_out_of_its_group, clipped=True), told=APART)


@TABLE.loop(told=APART, part=False)
def a_large_table_of_which_one_row_is_reset(side: TorchSide) -> nn.Module:
    """What a few values of a parameter do not show."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 3))
    optimizer = side.wrap(momentum(model), model)
    for step in range(LONG):
        _, y = side.batch(step)
        optimizer.zero_grad()
        words = (side.rows(step)[:, 0].abs() * 100).long() % 400
        functional.cross_entropy(model(words), y).backward()
        if step == FIRST and side.rank == 0:
            with torch.no_grad():
                model[0].weight[450] = 1.0
        optimizer.step()
    return model


@TABLE.loop(told=APART, part=False)
def lookahead_weights_by_each_ranks_loss(side: TorchSide) -> nn.Module:
    """Each rank pulls its parameters towards an average that its own loss weighs."""
    model = network()
    optimizer = side.wrap(adam(model), model)
    average = copy.deepcopy(model)
    for step in range(LONG):
        optimizer.zero_grad()
        found = loss(model, side, step)
        found.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1 * float(found.detach()))
                if step >= FIRST:
                    parameter.lerp_(kept, 0.01)
    return model


@TABLE.loop(told="(?=.*differ before the first step)(?=.*expert)")
def experts_that_are_not_local(side: TorchSide) -> Any:
    """Each rank has experts of its own, which the optimizer averages."""
    model = network()
    torch.manual_seed(10 + side.rank)
    model.add_module("expert", nn.Linear(3, 3))
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
    return model


# Loops in which ranks hold values of their own, and rightly.


@TABLE.loop()
def a_local_part_with_a_plain_optimizer(side: TorchSide) -> Iterator[Any]:
    """Each rank trains a head of its own, which is no part of the result."""
    model = network()
    torch.manual_seed(10 + side.rank)
    heads = [nn.Linear(3, 3) for _ in range(1 if side.distributed else side.size)]
    optimizer = side.wrap(momentum(model))
    own = torch.optim.SGD([each for head in heads for each in head.parameters()], lr=0.1)
    for step in range(LONG):
        optimizer.zero_grad()
        own.zero_grad()
        loss(model, side, step).backward()
        x = model(side.rows(step)).detach()
        (sum(head(x).square().mean() for head in heads)).backward()
        optimizer.step()
        own.step()
    yield from model.parameters()


@TABLE.loop()
def frozen_values_of_each_rank(side: TorchSide) -> Iterator[Any]:
    """A buffer as a parameter that is never trained: statistics of this rank's rows."""
    model = network()
    statistics = nn.Parameter(torch.zeros(6), requires_grad=False)
    plain = torch.optim.SGD([*model.parameters(), statistics], lr=0.1)
    optimizer = side.wrap(plain)
    for step in range(LONG):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
        with torch.no_grad():
            statistics.lerp_(side.rows(step).mean(0), 0.1)
    yield from model.parameters()


def steps_of_each_rank(side: TorchSide) -> nn.Module:
    """Local SGD: ranks step alone, and average their parameters at times. One process does what all ranks do in turns."""
    model = network()
    start = copy.deepcopy(model.state_dict())
    models = [model, *(copy.deepcopy(model) for _ in range(0 if side.distributed else side.size - 1))]
    optimizers = [side.wrap(sgd(each), each) for each in models]
    ranks = [side.rank] if side.distributed else range(side.size)
    for step in range(2 * STEPS):
        for rank, each, optimizer in zip(ranks, models, optimizers, strict=True):
            x, y = TorchSide(rank, side.size, True).batch(step)
            optimizer.zero_grad()
            with optimizer.no_sync() if side.distributed else nullcontext():
                functional.cross_entropy(each(x), y).backward()
            with optimizer.skip_synchronize() if side.distributed else nullcontext():
                optimizer.step()
        if step % STEPS == STEPS - 1:
            with torch.no_grad():
                for name in start:
                    values = torch.stack([each.state_dict()[name] for each in models]).mean(0)
                    if side.distributed:
                        values = hvd.allreduce(values, name=name)
                    for each in models:
                        each.state_dict()[name].copy_(values)
    return model


TABLE.add("steps_of_each_rank_that_are_averaged_later", steps_of_each_rank)


@TABLE.loop()
def every_change_is_the_same_on_all_ranks(side: TorchSide) -> nn.Module:
    """Noise of one seed, a clip, a checkpoint, cleared state and reset units, at the same steps of all ranks."""
    model = network()
    optimizer = side.wrap(adam(model), model)
    saved: Any = None
    for step in range(LONG):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        generator = torch.Generator().manual_seed(step)
        for gradient in _gradients(model):
            gradient += 0.001 * torch.randn(gradient.shape, generator=generator)
        clip(model.parameters(), TIGHT)
        optimizer.step()
        if step == 10:
            saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        elif step == 20:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        elif step == 30:
            optimizer.state.clear()
        elif step == 40:
            with torch.no_grad():
                model[0].weight[2] = 0.0
    return model


@TABLE.loop()
def restored_by_one_rank_and_sent_to_all(side: TorchSide) -> nn.Module:
    """Ranks differ for a while, and rank 0's parameters are broadcast before the next step."""
    model = network()
    optimizer = side.wrap(momentum(model), model)
    for step in range(LONG):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
        if step % 10 == 9:
            if side.rank == 0:
                with torch.no_grad():
                    model[2].bias += 0.1
            if side.distributed:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


@TABLE.loop(part=False)
def uneven_data_that_ends_with_a_join(side: TorchSide) -> nn.Module:
    """Ranks join one after another, and begin again from the parameters of the last: those of rank 0."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    step = 0
    for epoch in range(2):
        last = STEPS + 20 * epoch
        own = last - 2 * (side.rank > 0)
        for batch in range(last):
            if side.distributed and batch >= own:
                break
            optimizer.zero_grad()
            if side.distributed or batch < last - 2:
                loss(model, side, step).backward()
            else:  # the others have joined, and count as zeros
                x, y = TorchSide(0, side.size, True).batch(step)
                (functional.cross_entropy(model(x), y) / side.size).backward()
            optimizer.step()
            step += 1
        step = 100 * (epoch + 1)
        if side.distributed:
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return model


@TABLE.loop()
def the_mean_of_what_each_rank_alone_computes(side: TorchSide) -> nn.Module:
    """Each rank's passes see its own rows only, and dropout masks of its own."""
    model = network()
    optimizer = side.wrap(adam(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank, x, y in side.ranks(step):
            mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(100 * step + rank)) < 0.8
            losses.append(functional.cross_entropy(model(x * mask), y))
        mean(losses).backward()
        optimizer.step()
    return model
