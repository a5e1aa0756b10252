"""Parameters that come later, are frozen or unfrozen, shared, listed by hand, or belong to two optimizers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from parallel.torch.sent_gradients import sent_gradients, submitted
from regression import MAKERS, Batch, assert_as_alone, assert_close, assert_same_on_all_ranks, batches, loss_of, network
from torch_versions import needs_adagrad_that_grows


def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
@pytest.mark.parametrize(
    "maker", [pytest.param(each, marks=[needs_adagrad_that_grows] * (each == "adagrad")) for each in MAKERS]
)
def test_parameter_groups_that_are_added_later_are_reduced_too(
    job: Any, size: int, bucket_bytes: str, maker: str
) -> None:
    """With and without names, between steps and between backward and step, and one slipped in by hand."""

    def run(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
        step(model, optimizer, data[0])
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        step(model, optimizer, data[1])
        optimizer.zero_grad()
        loss_of(model, data[2]).backward()
        optimizer.add_param_group({"params": [model[4].weight]})  # its gradient is there
        optimizer.step()
        optimizer.param_groups[1]["params"].append(model[4].bias)
        for batch in data[3:]:
            step(model, optimizer, batch)

    def check() -> None:
        for named in (True, False):
            models = network(), network()
            for model, data, distributed in (
                (models[0], batches(6, size, hvd.rank()), True),
                (models[1], batches(6, size), False),
            ):
                optimizer: Any = MAKERS[maker](model[0].parameters())
                if distributed:
                    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters() if named else None)
                run(model, optimizer, list(data), distributed)
                if distributed:
                    assert optimizer._parameter_names[model[4].bias] == ("4.bias" if named else "noname.1.2")
            assert_close(*models)
            assert_same_on_all_ranks(models[0])

    job(size, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("before", ["zero_grad", "backward", "step"])
def test_parameters_that_are_unfrozen_later_are_reduced_from_then_on(job: Any, before: str, op: str) -> None:
    """Layer by layer, as in fine-tuning, at any point of a step. With equal data on all ranks Adasum is the average.

    Just before a step there is no gradient yet, which counts as zeros; so there plain gradient descent.
    """

    def check() -> None:
        models = network(), network()
        for model, distributed in ((models[0], True), (models[1], False)):
            for layer in (0, 2):
                model[layer].requires_grad_(False)
            optimizer: Any = MAKERS["sgd" if before == "step" else "adam"](model.parameters())
            data = batches(6, 2, hvd.rank() if distributed and op == "Average" else None)
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=getattr(hvd, op))
            for number, batch in enumerate(data):
                unfrozen = {2: model[2], 4: model[0]}.get(number, nn.Identity())
                if before == "zero_grad":
                    unfrozen.requires_grad_(True)
                optimizer.zero_grad()
                if before == "backward":
                    unfrozen.requires_grad_(True)
                loss_of(model, batch).backward()
                if before == "step":
                    unfrozen.requires_grad_(True)
                optimizer.step()
        assert_close(*models)
        assert_same_on_all_ranks(models[0])

    job(2, check)


def test_parameters_frozen_in_turns_train_as_in_one_process(job: Any) -> None:
    def run(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
        for number, batch in enumerate(data):
            for layer in (0, 2, 4):
                model[layer].requires_grad_(number % 3 != layer // 2)
            step(model, optimizer, batch)

    def check() -> None:
        for maker in MAKERS.values():
            assert_as_alone(run, maker, steps=7)

    job(2, check)
    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_a_model_that_is_all_frozen_at_first_trains_once_it_is_unfrozen(job: Any) -> None:
    def run(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
        if not distributed:
            model.requires_grad_(True)
        for batch in data:
            model.requires_grad_(True)
            step(model, optimizer, batch)

    def build() -> nn.Module:
        return network().requires_grad_(False)

    def check() -> None:
        for groups in (None, 2):
            assert_as_alone(run, MAKERS["momentum"], steps=3, build=build, groups=groups)

    job(2, check)


def test_tied_weights_named_or_listed_twice_are_reduced_once(job: Any) -> None:
    """One parameter twice: in the model's names and, by carelessness, twice in the optimizer's list."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.second(self.first(x).tanh()))

    def check() -> None:
        model, wanted = Tied(), Tied()
        named = list(model.named_parameters(remove_duplicate=False))
        assert len(named) == len(list(model.parameters())) + 1
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), named)
        for batch in batches(4, 2, hvd.rank()):
            step(model, optimizer, batch)
        other = MAKERS["adam"](wanted.parameters())
        for batch in batches(4, 2):
            step(wanted, other, batch)
        assert_close(model, wanted)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            twice = torch.optim.SGD([model.first.weight, model.first.weight], lr=0.1)
        optimizer = hvd.DistributedOptimizer(twice)
        step(model, optimizer, next(batches(1, 2, hvd.rank())))
        assert_same_on_all_ranks(model)

    job(2, check)


def test_groups_may_hold_frozen_and_foreign_parameters_and_mixed_types(job: Any) -> None:
    """Groups may name what the optimizer does not have or what is frozen, and mix data types."""

    def check() -> None:
        models = network(), network()
        for model, distributed in ((models[0], True), (models[1], False)):
            model[2].double()
            model[0].bias.requires_grad_(False)
            optimizer: Any = MAKERS["momentum"](model.parameters())
            if distributed:
                groups = [
                    [nn.Parameter(torch.ones(1)), model[0].bias],
                    [model[2].weight, model[4].weight],
                    (model[0].weight,),
                ]
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
                before = submitted()
            for x, y in batches(4, 2, hvd.rank() if distributed else None):
                optimizer.zero_grad()
                out = model[4](model[2](model[:2](x).double()).float().tanh())
                nn.functional.mse_loss(out, y).backward()
                optimizer.step()
            if distributed:
                requests = {each.request.name: each.request for each in sent_gradients(before)}.values()
                names = sorted([sorted(each.name for each in request.tensors) for request in requests])
                assert names == [
                    ["allreduce.0.weight"],
                    ["allreduce.2.bias"],
                    ["allreduce.2.weight", "allreduce.4.weight"],
                    ["allreduce.4.bias"],
                ]
        assert_close(*models)

    job(2, check)


def test_a_second_optimizer_of_the_same_model_takes_over_and_hands_back(job: Any) -> None:
    """The first is still there, as in a notebook or when training changes its optimizer; going back to it is right, too."""

    def check() -> None:
        models = network(), network()
        for model, distributed in ((models[0], True), (models[1], False)):
            steppers: list[Any] = [MAKERS[name](model.parameters()) for name in ("momentum", "adam")]
            data = batches(9, 2, hvd.rank() if distributed else None)
            if distributed:
                steppers[0] = hvd.DistributedOptimizer(steppers[0])
            for number, batch in enumerate(data):
                if number == 3 and distributed:
                    steppers[1] = hvd.DistributedOptimizer(steppers[1])
                if number >= 6 and distributed:
                    with steppers[1].no_sync():
                        step(model, steppers[0], batch)
                else:
                    step(model, steppers[0 if number < 3 or number >= 6 else 1], batch)
        assert_close(*models)
        assert_same_on_all_ranks(models[0])

    job(2, check)


def test_zero_grad_of_an_older_optimizer_discards_what_a_later_one_keeps_aside(job: Any) -> None:
    """A sum keeps the reduced part of a gradient aside while passes add to a local one."""

    def check() -> None:
        weight = nn.Parameter(torch.zeros(2))
        older, later = (hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum) for _ in range(2))
        weight.sum().backward()
        assert weight.grad.tolist() == [2.0, 2.0]
        with later.no_sync():
            weight.sum().backward()
        older.zero_grad()
        weight.sum().backward()
        older.step()
        assert weight.tolist() == [-2.0, -2.0]
        del later

    job(2, check)


def test_a_dropped_optimizer_lets_go_of_everything(job: Any) -> None:
    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        step(model, optimizer, next(batches(1, 2, hvd.rank())))
        gone = [weakref.ref(optimizer), weakref.ref(model[0].weight)]
        gc.disable()
        try:
            del optimizer
            assert [each() is None for each in gone] == [True, False]
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            del model
            assert gone[1]() is None
        finally:
            gc.enable()

    job(2, check)
