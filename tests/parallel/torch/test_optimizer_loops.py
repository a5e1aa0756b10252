"""Training loops as written for one process or for DistributedDataParallel: no Horovod between backward and step.

Gradients are reduced when ``backward()`` returns, so each loop trains as one process does on all ranks' batches together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
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
from torch_versions import needs_scaler

CLIP = 0.05
Loop = Callable[[nn.Module, Any, list[Batch], bool], None]


def clipping(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def zeroed_at_the_end(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def zeroed_in_place_by_the_model(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        model.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def zeroed_by_hand(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for number, batch in enumerate(data):
        for p in model.parameters():
            if number % 2 or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def scaled_and_clipped(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()


def accumulated_and_clipped(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
    """The one line of Horovod stands before the loop."""
    if distributed:
        optimizer.set_backward_passes_per_step(2)
    for number, batch in enumerate(data, 1):
        (loss_of(model, batch) / 2).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def closure_that_clips(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            return loss

        optimizer.step(closure)


def scaled_by_hand(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()


LOOPS: list[Loop] = [
    clipping,
    zeroed_at_the_end,
    zeroed_in_place_by_the_model,
    zeroed_by_hand,
    accumulated_and_clipped,
    closure_that_clips,
    scaled_by_hand,
]
SCALED: list[Loop] = [scaled, scaled_and_clipped]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
@pytest.mark.parametrize("loops", [LOOPS, pytest.param(SCALED, marks=needs_scaler)], ids=["unscaled", "scaled"])
def test_a_loop_without_horovods_calls_trains_as_one_process_does(
    job: Any, size: int, bucket_bytes: str, loops: list[Loop]
) -> None:
    def check() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for loop in loops:
                for maker in ("momentum", "adam"):
                    assert_as_alone(loop, MAKERS[maker], steps=6)

    job(size, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})


@pytest.mark.parametrize("size", [2, 3])
def test_lbfgs_with_clipping_trains_as_one_process_does(job: Any, size: int) -> None:
    def run(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
        for x, y in data:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, (x.double(), y.double()))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            optimizer.step(closure)

    def check() -> None:
        assert_as_alone(
            run,
            lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=8),
            steps=3,
            build=lambda: network().double(),
        )

    job(size, check)


@pytest.mark.parametrize("size", [2, 3])
def test_two_models_with_an_optimizer_each_train_as_in_one_process(job: Any, size: int) -> None:
    """For one loss; for a loss each, one after the other; and with both losses before both steps."""

    def one_loss(models: list[nn.Module], optimizers: list[Any], batch: Batch) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(models[0], batch) + loss_of(models[1], batch)).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    def in_turns(models: list[nn.Module], optimizers: list[Any], batch: Batch) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    def losses_first(models: list[nn.Module], optimizers: list[Any], batch: Batch) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            loss_of(model, batch).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    def check() -> None:
        for step in (one_loss, in_turns, losses_first):
            trained = []
            for rank in (hvd.rank(), None):
                models: list[nn.Module] = [network(), network()]
                optimizers: list[Any] = [
                    MAKERS[name](model.parameters()) for name, model in zip(("momentum", "adam"), models, strict=True)
                ]
                if rank is not None:
                    optimizers = [hvd.DistributedOptimizer(each) for each in optimizers]
                for batch in batches(5, size, rank):
                    step(models, optimizers, batch)
                trained.append(models)
            for found, wanted in zip(*trained, strict=True):
                assert_close(found, wanted)
                assert_same_on_all_ranks(found)

    job(size, check)


def test_ranks_whose_passes_reach_different_optimizers_do_not_deadlock(job: Any) -> None:
    """Each rank's pass fills what the other's leaves empty: nobody waits in backward for what the other sends in step()."""

    def check() -> None:
        for begin in (True, False):
            models, wanted = [network(), network()], [network(), network()]
            optimizers: list[Any] = [hvd.DistributedOptimizer(MAKERS["sgd"](each.parameters())) for each in models]
            others = [MAKERS["sgd"](each.parameters()) for each in wanted]
            for mine, both in zip(
                batches(3, 2, hvd.rank()), zip(batches(3, 2, 0), batches(3, 2, 1), strict=True), strict=True
            ):
                for optimizer in (*(optimizers if begin else ()), *others):
                    optimizer.zero_grad()
                loss_of(models[hvd.rank()], mine).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    if not begin:
                        optimizer.zero_grad()
                for rank, batch in enumerate(both):
                    (loss_of(wanted[rank], batch) / 2).backward()
                    others[rank].step()
            for found, alone in zip(models, wanted, strict=True):
                assert_close(found, alone)

    job(2, check)


def test_gradients_that_only_some_ranks_have_are_reduced_when_backward_returns(job: Any) -> None:
    """Each rank reaches another layer. All may change the gradients then, with and without ``synchronize()``."""

    def check() -> None:
        model = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))
        for layer in model:
            nn.init.zeros_(layer.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for explicit in (True, False):
            optimizer.zero_grad()
            model[hvd.rank()](torch.full((1, 3), 2.0)).sum().backward()
            if explicit:
                optimizer.synchronize()
            for layer in model:
                layer.weight.grad.mul_(3.0)
            with optimizer.skip_synchronize() if explicit else nullcontext():
                optimizer.step()
        assert [layer.weight.tolist() for layer in model] == [[[-6.0] * 3]] * 2
        optimizer.zero_grad()
        sum(layer(torch.ones(1, 3)).sum() for layer in model).backward()
        optimizer.step()
        assert [layer.weight.tolist() for layer in model] == [[[-7.0] * 3]] * 2

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})
    job(2, check)


def test_a_hook_that_changes_a_gradient_while_it_is_reduced_is_an_error(job: Any) -> None:
    """One that was registered before the optimizer's changes it before it is sent, as with DistributedDataParallel."""

    def check() -> None:
        def double(parameter: torch.Tensor) -> None:
            parameter.grad.mul_(2.0)  # type: ignore[union-attr]

        def remove(parameter: torch.Tensor) -> None:
            parameter.grad = None

        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        before = model.weight.register_post_accumulate_grad_hook(double)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
        assert model.weight.grad.tolist() == [[3.0, 3.0]]
        optimizer.zero_grad()
        before.remove()
        for hook, text in ((double, "changed while it was being reduced"), (remove, "has removed the gradient")):
            if hook is remove:  # before the optimizer's hook
                model = nn.Linear(2, 1, bias=False)
                handle = model.weight.register_post_accumulate_grad_hook(hook)
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
            else:
                handle = model.weight.register_post_accumulate_grad_hook(hook)
            with pytest.raises(AssertionError, match=rf"{text}|'weight'"):
                model(torch.ones(1, 2)).sum().backward()
            handle.remove()
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()  # the job goes on
            assert model.weight.grad.tolist() == [[1.0, 1.0]]

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(["backward", "synchronize", "unused layer", "zeroed by the model"], id="other moments"),
        pytest.param(["unscale"], marks=needs_scaler, id="unscale"),
    ],
)
def test_a_layer_whose_gradient_is_removed_does_not_move(job: Any, bucket_bytes: str, moments: list[str]) -> None:
    """And the others' gradients are reduced once, whenever it happens."""

    def check() -> None:
        for when in moments:
            model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False), nn.Linear(1, 1)])
            nn.init.ones_(model[0].weight)
            nn.init.ones_(model[1].weight)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model[: 3 if when == "unused layer" else 2].parameters(), lr=1.0, momentum=0.9),
                op=hvd.Sum,
            )
            scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0) if when == "unscale" else None
            for _ in range(2):
                (model if when == "zeroed by the model" else optimizer).zero_grad()
                loss = model[1](model[0](torch.full((1, 3), hvd.rank() + 1.0))).sum()
                (scaler.scale(loss) if when == "unscale" else loss).backward()
                if when == "synchronize":
                    optimizer.synchronize()
                if when != "unused layer":
                    assert model[0].weight.grad.unique().tolist() == [12.0 if when == "unscale" else 3.0]
                if when == "unscale":
                    scaler.unscale_(optimizer)
                model[1].weight.grad = None
                if when == "unscale":
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        optimizer.step()
                assert model[0].weight.grad.unique().tolist() == [3.0]
            assert model[1].weight.unique().tolist() == [1.0]
            assert torch.allclose(model[0].weight, torch.tensor(1.0 - 3.0 - 1.9 * 3.0))

    job(2, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})


def test_an_exception_inside_backward_says_how_to_go_on_and_that_works(job: Any) -> None:
    """One layer's gradient was sent before it; what the error says to do leads out."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise KeyError("out of luck")

    def check() -> None:
        for op in (hvd.Average, hvd.Adasum):
            first, last = nn.Linear(2, 2), nn.Linear(2, 1)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([*first.parameters(), *last.parameters()], lr=1.0), op=op
            )
            with pytest.raises(KeyError):
                last(Fails.apply(first(torch.ones(1, 2)))).sum().backward()
            call = "synchronize" if op == hvd.Average else "step"
            text = rf"After an exception inside backward\(\), call optimizer.{call}\(\)"
            with pytest.raises(AssertionError, match=text):
                optimizer.zero_grad()
            with pytest.raises(AssertionError, match=text):
                last(first(torch.ones(1, 2))).sum().backward()
            optimizer.synchronize() if op == hvd.Average else optimizer.step()
            optimizer.zero_grad()
            last(first(torch.ones(1, 2))).sum().backward()
            optimizer.step()

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_a_failed_reduction_is_raised_by_backward(job: Any) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
        if hvd.rank() == 0:
            parameter.data = parameter.data.double()
        optimizer.zero_grad()
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            parameter.sum().backward()
        parameter.data = parameter.data.float()
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-1.0, -1.0]

    job(2, check)
