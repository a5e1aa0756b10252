"""A gradient scaler around the optimizer: it unscales reduced gradients in every style, and all ranks skip the same steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import MAKERS, Batch, assert_close, assert_same_on_all_ranks, batches, loss_of, network
from torch_versions import needs_fused, needs_scaler

pytestmark = needs_scaler
CLIP = 0.5


def synchronize_first(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """As documented."""
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def as_in_one_process(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """Without a word to Horovod."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)


def synchronize_second(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """In the wrong order: the gradients must not be reduced twice."""
    scaler.unscale_(optimizer)
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def clip_between(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """Unscaled and clipped before, and then told to skip: also right."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


STYLES = [synchronize_first, as_in_one_process, synchronize_second, clip_between]


@pytest.mark.parametrize("implementation", ["foreach", pytest.param("fused", marks=needs_fused)])
@pytest.mark.parametrize("size", [2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(job: Any, size: int, implementation: str) -> None:
    """That step is skipped by all, in every style; the others are those of one process. Whether averaged or summed."""

    def check() -> list[float]:
        return [
            run(style, op, learning, zeroed)
            for style in STYLES
            for op, learning in ((hvd.Average, 1.0), (hvd.Sum, 1.0 / size))
            for zeroed in ("optimizer", "model")
        ]

    def run(style: Any, op: Any, learning: float, zeroed: str) -> float:
        model, wanted = network(), network()

        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **{implementation: True})

        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), op=op)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        other = make(wanted.parameters())
        for number, (mine, everybodys) in enumerate(zip(batches(6, size, hvd.rank()), batches(6, size), strict=True)):
            (model if zeroed == "model" else optimizer).zero_grad()
            loss = loss_of(model, mine) * learning
            if number in (2, 3) and hvd.rank() == size - 1:
                loss = loss * float("inf" if number == 2 else "nan")
            scaler.scale(loss).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                style(model, optimizer, scaler)
            scaler.update()
            if number not in (2, 3):
                other.zero_grad()
                loss_of(wanted, everybodys).backward()
                nn.utils.clip_grad_norm_(wanted.parameters(), CLIP)
                other.step()
        assert_close(model, wanted)
        assert_same_on_all_ranks(model)
        return scaler.get_scale()

    assert {scale for each in job(size, check) for scale in each} == {256.0}


def test_a_rank_without_gradients_steps_as_the_others(job: Any) -> None:
    """It gets them from the others and unscales them, and skips the step with them."""

    def check() -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for factor in (1.0, float("inf"), 1.0):
            parameter.grad = None
            loss = scaler.scale(parameter.sum() * factor)
            if hvd.rank() == 0:
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        assert parameter.tolist() == [-1.0, -1.0] and scaler.get_scale() == 2.0

    job(2, check)


def test_accumulation_under_a_scaler_trains_as_in_one_process(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["adam"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        other = MAKERS["adam"](wanted.parameters())
        for which, stepper, source in (
            (model, optimizer, list(batches(5, 2, hvd.rank()))),
            (wanted, other, list(batches(5, 2))),
        ):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            for start in range(0, 5, 2):
                stepper.zero_grad()
                for batch in source[start : start + 2]:
                    scaler.scale(loss_of(which, batch)).backward()
                if which is model and start == 4:  # fewer passes than announced
                    stepper.synchronize()
                scaler.unscale_(stepper)
                nn.utils.clip_grad_norm_(which.parameters(), CLIP)
                scaler.step(stepper)
                scaler.update()
        assert_close(model, wanted)

    job(2, check)


def test_autocast_under_a_scaler_trains_close_to_one_process(job: Any) -> None:
    """Autocast to bfloat16, as scripts have it around a scaler."""

    def run(model: nn.Module, optimizer: Any, data: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for batch in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        run(model, optimizer, batches(5, 2, hvd.rank()))
        run(wanted, MAKERS["sgd"](wanted.parameters()), batches(5, 2))
        assert_close(model, wanted, rtol=2e-2, atol=5e-3)
        assert_same_on_all_ranks(model)

    job(2, check)


def test_a_scaler_refuses_gradients_that_are_not_reduced(job: Any) -> None:
    def check() -> None:
        model = network()
        batch: Batch = next(batches(1, 2, hvd.rank()))
        adasum = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batch)).backward()
        with pytest.raises(AssertionError, match=r"a gradient scaler cannot be used with op=hvd\.Adasum"):
            scaler.step(adasum)
        adasum.step()
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu")
        with optimizer.no_sync():
            scaler.scale(loss_of(model, batch)).backward()
        with pytest.raises(AssertionError, match="gradients that are not reduced"):
            scaler.step(optimizer)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    job(2, check)
