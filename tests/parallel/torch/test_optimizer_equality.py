"""Every optimizer in every way of stepping: as in one process on all ranks' batches together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from part import some
from regression import (
    MAKERS,
    Batch,
    assert_as_alone,
    assert_close,
    assert_same_on_all_ranks,
    batches,
    loss_of,
    network,
    scaled,
)
from torch_versions import needs_fused, needs_scaler

CLIP = 0.5


def plain(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def clipped(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if distributed:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if distributed:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


def scaled_and_clipped(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if distributed:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if distributed:
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()


def accumulated(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    """Two passes a step, announced; the last step has only one."""
    if distributed:
        optimizer.set_backward_passes_per_step(2)
    for start in range(0, len(data), 2):
        optimizer.zero_grad()
        for batch in data[start : start + 2]:
            loss_of(model, batch).backward()
        optimizer.step()


def unsynchronized(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    """Two passes a step, the first inside ``no_sync()``; in the last step, both."""
    for start in range(0, len(data), 2):
        optimizer.zero_grad()
        for number, batch in enumerate(data[start : start + 2]):
            if distributed and (number == 0 or start + 2 >= len(data)):
                with optimizer.no_sync():
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
        optimizer.step()


def by_closure(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    for batch in data:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def closure_that_clips(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    for batch in data:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if distributed:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            return loss

        optimizer.step(closure)


def zeroed_by_the_model(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for number, batch in enumerate(data):
        model.zero_grad(set_to_none=number % 2 == 0)
        loss_of(model, batch).backward()
        optimizer.step()


WAYS = [plain, clipped, accumulated, unsynchronized, by_closure, closure_that_clips, zeroed_by_the_model]
SCALED = [scaled_and_clipped, scaled]


@pytest.mark.parametrize("ways", [WAYS, pytest.param(SCALED, marks=needs_scaler)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("size", some([2, 3, 4], [3]))
def test_every_optimizer_trains_as_one_process_in_every_way_of_stepping(job: Any, size: int, ways: list[Any]) -> None:
    def check() -> None:
        for way in ways:
            for maker in MAKERS.values():
                assert_as_alone(way, maker, steps=5)

    job(size, check)
    if size == 3:
        job(size, check, env={"HOROVOD_BUCKET_BYTES": "1"})  # a bucket for every parameter


FOREACH: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
]
FUSED: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-4, fused=True),
]


@pytest.mark.parametrize("makers", [FOREACH, pytest.param(FUSED, marks=needs_fused)], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    "ways", [[plain, clipped], pytest.param(SCALED, marks=needs_scaler)], ids=["unscaled", "scaled"]
)
def test_foreach_and_fused_optimizers_train_as_in_one_process(job: Any, ways: list[Any], makers: list[Any]) -> None:
    """The fused ones unscale gradients themselves, if a gradient scaler tells them to."""

    def check() -> None:
        for way in ways:
            for maker in makers:
                assert_as_alone(way, maker, steps=5)

    job(2, check)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_lbfgs_evaluates_as_often_as_one_process_and_every_rank_gets_the_same_loss(
    job: Any, size: int, search: str | None
) -> None:
    """It decides by the loss how often to evaluate, so every rank must see the loss of all batches."""

    def check() -> None:
        evaluations: list[int] = [0, 0]

        def run(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
            for x, y in data:

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    evaluations[distributed] += 1
                    optimizer.zero_grad()
                    loss = loss_of(model, (x.double(), y.double()))
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
                if distributed:
                    assert hvd.allgather_object(loss.item()).count(loss.item()) == size

        assert_as_alone(
            run,
            lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=20, tolerance_change=0.02, line_search_fn=search),
            steps=3,
            build=lambda: network().double(),
        )
        assert evaluations[0] == evaluations[1] != 3 * 20

    job(size, check)


def test_lbfgs_averages_a_loss_that_is_a_number(job: Any) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([parameter], max_iter=1))

        def closure() -> float:
            optimizer.zero_grad()
            loss = (parameter - hvd.rank()).square().sum()
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) == 1.0  # of 0 and 2

    job(2, check)


@pytest.mark.parametrize("size", [2, 3])
def test_two_optimizers_of_one_model_train_as_in_one_process_together_or_in_turns(job: Any, size: int) -> None:
    def check() -> None:
        for together in (True, False):
            for first in MAKERS:
                model, wanted = network(), network()

                def run(which: nn.Module, wrap: bool, first: str = first, together: bool = together) -> None:
                    halves = [which[:2], which[2:]]
                    steppers: list[Any] = [
                        MAKERS[first](halves[0].parameters()),
                        MAKERS["adam"](halves[1].parameters()),
                    ]
                    if wrap:
                        steppers = [hvd.DistributedOptimizer(each) for each in steppers]
                    for batch in batches(4, size, hvd.rank() if wrap else None):
                        if together:
                            for stepper in steppers:
                                stepper.zero_grad()
                            loss_of(which, batch).backward()
                            for stepper in steppers:
                                stepper.step()
                        else:
                            for stepper in steppers:  # backward reaches the other's parameters, too
                                stepper.zero_grad()
                                loss_of(which, batch).backward()
                                stepper.step()

                run(model, True)
                run(wanted, False)
                assert_close(model, wanted)
                assert_same_on_all_ranks(model)

    job(size, check)
