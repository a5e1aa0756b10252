"""Loops that add up several passes before a reduction: windows, ``no_sync()``, and accumulation by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd
from loops.harness import Table
from loops.pytorch import STEPS, TIGHT, TorchSide, clip, loss, network, sgd

TABLE: Table[TorchSide] = Table("windows")
LOCAL = r"AssertionError: The gradient of '\S+' was changed before its reduction: this rank's gradients are its own"


def quiet(side: TorchSide, optimizer: Any) -> AbstractContextManager[None]:
    """``no_sync()`` on a rank."""
    inside: AbstractContextManager[None] = optimizer.no_sync() if side.distributed else nullcontext()
    return inside


def window(side: TorchSide, zero_at_end: bool = False, **wrapping: Any) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=3, **wrapping)
    for step in range(3):
        if not zero_at_end:
            optimizer.zero_grad()
        for part in range(3):
            (loss(model, side, 3 * step + part) / 3).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
        if zero_at_end:
            optimizer.zero_grad()
    return model


TABLE.add("a_window", window)
TABLE.add("a_window_with_zero_grad_at_the_end", partial(window, zero_at_end=True), part=False)


@TABLE.loop()
def a_partial_last_window(side: TorchSide) -> nn.Module:
    """Seven batches in windows of three: the last step has one."""
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=3)
    for batch in range(7):
        loss(model, side, batch).backward()
        if batch % 3 == 2 or batch == 6:
            optimizer.step()
            optimizer.zero_grad()
    return model


@TABLE.loop()
def a_partial_last_window_with_a_clip(side: TorchSide) -> nn.Module:
    """synchronize() reduces what the window has; the clip comes after it."""
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=3)
    for batch in range(8):
        loss(model, side, batch).backward()
        if batch % 3 == 2 or batch == 7:
            if side.distributed:
                optimizer.synchronize()
            clip(model.parameters(), TIGHT)
            with optimizer.skip_synchronize() if side.distributed else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    return model


@TABLE.loop(refused=LOCAL)
def a_clip_of_a_partial_window(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=3)
    for batch in range(4):
        loss(model, side, batch).backward()
        if batch % 3 == 2 or batch == 3:
            clip(model.parameters(), TIGHT)
            optimizer.step()
            optimizer.zero_grad()
    return model


def clip_inside_a_window(side: TorchSide, **wrapping: Any) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=2, **wrapping)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, side, 2 * step + part).backward()
            clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


TABLE.add("a_clip_inside_a_window", clip_inside_a_window, refused=LOCAL)
TABLE.add("a_clip_inside_a_window_of_sums", partial(clip_inside_a_window, op=hvd.Sum), refused=LOCAL)


@TABLE.loop(refused=LOCAL)
def a_replacement_inside_a_window(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=2)
    loss(model, side, 0).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign() * 2
        parameter.grad += 1
    loss(model, side, 1).backward()
    optimizer.step()
    return model


@TABLE.loop()
def a_window_in_which_gradients_are_thrown_away(side: TorchSide) -> nn.Module:
    """A warm-up pass whose gradients are thrown away, then the passes of the step."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(3):
        optimizer.zero_grad()
        with quiet(side, optimizer):
            loss(model, side, 50 + step).backward()
        for parameter in model.parameters():
            parameter.grad = None
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def no_sync_but_for_the_last(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            with quiet(side, optimizer) if part < 2 else nullcontext():
                (loss(model, side, 3 * step + part) / 3).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def no_sync_and_a_last_pass_over_a_part(side: TorchSide) -> nn.Module:
    model = nn.ModuleList([network(1), network(2)])
    optimizer = side.wrap(sgd(model), model)
    for step in range(3):
        optimizer.zero_grad()
        with quiet(side, optimizer):
            (loss(model[0], side, step) + loss(model[1], side, step)).backward()
        loss(model[1], side, 10 + step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def all_inside_no_sync(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with quiet(side, optimizer):
            loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop(refused=LOCAL)
def a_clip_after_no_sync(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(2):
        optimizer.zero_grad()
        with quiet(side, optimizer):
            loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop(refused=r"leave the block before step\(\)", part=False)
def a_step_inside_no_sync(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    with quiet(side, optimizer):
        loss(model, side, 0).backward()
        optimizer.step()
    return model


@TABLE.loop()
def accumulation_by_hand(side: TorchSide) -> nn.Module:
    """As in most scripts: several passes, then a step. Each is reduced."""
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for batch in range(8):
        (loss(model, side, batch) / 3).backward()
        if (batch + 1) % 3 == 0 or batch == 7:
            clip(model.parameters(), TIGHT)
            optimizer.step()
            optimizer.zero_grad()
    return model


@TABLE.loop()
def windows_that_grow(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(3):
        if side.distributed:
            optimizer.set_backward_passes_per_step(step + 1)
        optimizer.zero_grad()
        for part in range(step + 1):
            loss(model, side, 5 * step + part).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop()
def more_passes_than_the_window(side: TorchSide) -> nn.Module:
    """Two windows, then a part of one, in one step."""
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(5):
            loss(model, side, 5 * step + part).backward()
            if part in (1, 3):
                clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


def scaler_of(steps: int) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=steps)


def scaled(side: TorchSide, unscale: bool, passes: int = 1) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    scaler = scaler_of(2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            scaler.scale(loss(model, side, passes * step + part)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            clip(model.parameters(), TIGHT)
        scaler.step(optimizer)
        scaler.update()
    return model


TABLE.add("scaled", partial(scaled, unscale=False), part=False)
TABLE.add("scaled_and_clipped_with_two_passes", partial(scaled, unscale=True, passes=2))


@TABLE.loop()
def a_scaler_skips_a_step_for_infinite_gradients_of_one_rank(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    scaler = scaler_of(2)
    for step in range(STEPS):
        optimizer.zero_grad()
        found = loss(model, side, step)
        if step == 1 and side.rank == 0:
            found = found * float("inf")
        scaler.scale(found).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), TIGHT)
        scaler.step(optimizer)
        scaler.update()
    return model


@TABLE.loop(refused="A gradient scaler was about to step with gradients that are not reduced", part=False)
def a_scaler_after_no_sync(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    scaler = scaler_of(2)
    with quiet(side, optimizer):
        scaler.scale(loss(model, side, 0)).backward()
    scaler.step(optimizer)
    return model
