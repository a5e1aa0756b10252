"""Loops in which parameters are frozen, unfrozen, added, replaced, or belong to several optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loops.harness import Table
from loops.pytorch import STEPS, TIGHT, TorchSide, clip, loss, network, sgd

TABLE: Table[TorchSide] = Table("parameters")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def frozen_midway(side: TorchSide, freeze: tuple[int, ...], zero_at_end: bool) -> nn.Module:
    """A layer is frozen before the steps in ``freeze``, and trained in the others."""
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), model)
    for step in range(5):
        model[0].requires_grad_(step not in freeze)
        if not zero_at_end:
            optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
        if zero_at_end:
            optimizer.zero_grad()
    return model


for _name, _steps in {"frozen_midway": (2, 3, 4), "unfrozen_midway": (0, 1), "frozen_in_turns": (1, 3)}.items():
    TABLE.add(_name, partial(frozen_midway, freeze=_steps, zero_at_end=False), part=_name == "frozen_midway")
    TABLE.add(
        f"{_name}_zero_grad_at_the_end",
        partial(frozen_midway, freeze=_steps, zero_at_end=True),
        part=_name == "frozen_in_turns",
    )


@TABLE.loop()
def frozen_between_two_passes(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, side, 2 * step).backward()
        model[0].requires_grad_(False)
        loss(model, side, 2 * step + 1).backward()
        clip(model.parameters(), TIGHT)
        model[0].requires_grad_(True)
        optimizer.step()
    return model


@TABLE.loop()
def gradual_unfreezing_with_new_groups(side: TorchSide) -> nn.Module:
    """As fine-tuning of language models does: from the last layer to the first, each in a group of its own."""
    model = network()
    model[0].requires_grad_(False)
    made = torch.optim.SGD(model[2].parameters(), lr=0.1)
    optimizer = side.wrap(made, model)
    for step in range(STEPS):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.05})
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip([each for each in model.parameters() if each.requires_grad], TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def densification(side: TorchSide) -> Iterator[Any]:
    """As splatting: points are added and pruned, and the state of Adam is carried over."""
    torch.manual_seed(1)
    points = nn.Parameter(torch.randn(5, 6))
    optimizer = side.wrap(torch.optim.Adam([{"params": [points], "lr": 0.01, "name": "points"}]))
    for step in range(6):
        if step in (2, 4):
            group = optimizer.param_groups[0]
            old = group["params"][0]
            state = optimizer.state.pop(old)
            kept = slice(1, None) if step == 4 else slice(None)
            new = nn.Parameter(torch.cat([old.detach()[kept], old.detach()[:2] * 0.9]))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.cat([state[name][kept], torch.zeros(2, 6)])
            group["params"][0] = points = new
            optimizer.state[new] = state
        optimizer.zero_grad(set_to_none=True)
        torch.cdist(side.rows(step), points).min(1).values.mean().backward()
        optimizer.step()
    yield points


@TABLE.loop(refused="'[^']*' was added to the optimizer after its last zero_grad")
def only_new_parameters_are_reached_and_clipped(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            model[0].requires_grad_(False)
            torch.manual_seed(5)
            model[2] = nn.Linear(8, 3)
            optimizer.param_groups[0]["params"][2:] = [*model[2].parameters()]
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
        optimizer.zero_grad()
    return model


@TABLE.loop()
def a_swapped_head(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            torch.manual_seed(5)
            model[2] = nn.Linear(8, 3)
            optimizer.param_groups[0]["params"][2:] = [*model[2].parameters()]
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
        optimizer.zero_grad()
    return model


@TABLE.loop(part=False)
def a_removed_parameter(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            del optimizer.param_groups[0]["params"][0]
            model[0].weight.requires_grad_(False)
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop(part=False)
def data_replaced(side: TorchSide) -> nn.Module:
    """``parameter.data = ...`` with another shape: the parameter is the same object."""
    model = nn.Sequential(nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.1), model[0].bias.fill_(0.0)
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 2:
            model[0].weight.data = torch.cat([model[0].weight.data] * 2, 1)
            model[0].in_features = 12
        x, y = side.batch(step)
        x = torch.cat([x] * 2, 1) if step >= 2 else x
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@TABLE.loop()
def adam_then_sgd(side: TorchSide) -> nn.Module:
    """SWATS: a second optimizer takes over."""
    model = network()
    first, second = side.wrap(adam(model), model), side.wrap(sgd(model), model)
    for step in range(6):
        optimizer = first if step < 3 else second
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def two_optimizers_step_with_the_same_gradients(side: TorchSide) -> nn.Module:
    model = network()
    first, second = side.wrap(adam(model), model), side.wrap(sgd(model), model)
    for step in range(STEPS):
        first.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        first.step()
        second.step()
    return model


@TABLE.loop()
def optimizers_in_turns_over_shared_parameters(side: TorchSide) -> nn.Module:
    """One has all parameters, the other the head alone."""
    model = network()
    first, second = side.wrap(adam(model), model), side.wrap(sgd(model[2]), model)
    for step in range(6):
        optimizer = (first, second)[step % 2]
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip([each for group in optimizer.param_groups for each in group["params"]], TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def optimizers_of_earlier_folds_are_alive(side: TorchSide) -> nn.Module:
    torch.manual_seed(1)
    fresh = network().state_dict()
    fresh = copy.deepcopy(fresh)
    model, kept = network(), []
    found = nn.ModuleList()
    for fold in range(3):
        model.load_state_dict(fresh)
        optimizer = side.wrap(adam(model), model)
        kept.append(optimizer)
        for step in range(2):
            optimizer.zero_grad()
            loss(model, side, 2 * fold + step).backward()
            clip(model.parameters(), TIGHT)
            optimizer.step()
        found.append(copy.deepcopy(model))
    return found


@TABLE.loop(part=False)
def a_new_model_and_optimizer_each_fold(side: TorchSide) -> nn.Module:
    found, kept = nn.ModuleList(), []
    for fold in range(3):
        model = network(fold)
        kept.append(side.wrap(adam(model), model))
        for step in range(2):
            kept[-1].zero_grad()
            loss(model, side, 2 * fold + step).backward()
            kept[-1].step()
        found.append(model)
    return found


class LowRank(nn.Module):
    """LoRA: a frozen layer and two small matrices."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, layer.in_features), 1 / math.sqrt(layer.in_features)))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return found


def low_rank(side: TorchSide, only_trained: bool) -> nn.Module:
    model = network()
    model[0], model[2] = LowRank(model[0]), LowRank(model[2])
    trained = [each for each in model.parameters() if each.requires_grad]
    made = torch.optim.AdamW(trained if only_trained else model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = side.wrap(made, model)
    for step in range(5):
        if step == 3:  # merged, and begun again
            for part in (model[0], model[2]):
                with torch.no_grad():
                    part.layer.weight += part.up @ part.down
                    part.up.zero_()
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(trained, TIGHT)
        optimizer.step()
    return model


TABLE.add("low_rank", partial(low_rank, only_trained=True))
TABLE.add("low_rank_with_all_parameters_in_the_optimizer", partial(low_rank, only_trained=False), part=False)
