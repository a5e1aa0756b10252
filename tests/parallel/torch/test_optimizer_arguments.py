"""What DistributedOptimizer refuses when it is made: every condition of the interface's table, on every rank, at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from parallel.torch.sent_gradients import sent_gradients, submitted
from regression import MAKERS, alone, assert_close, batches, network, train

Arguments = Callable[[nn.Module], dict[str, Any]]
GROUPS = r"groups should be a non-negative integer or a list of list of torch\.Tensor\."
REFUSED: dict[str, tuple[str, Arguments]] = {
    "predivide with another op": (
        "gradient_predivide_factor not supported with op != Average",
        lambda m: {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    ),
    "predivide of zero": ("gradient_predivide_factor must be > 0", lambda m: {"gradient_predivide_factor": 0.0}),
    "no passes": ("backward_passes_per_step must be > 0", lambda m: {"backward_passes_per_step": 0}),
    "fewer than no passes": ("backward_passes_per_step must be > 0", lambda m: {"backward_passes_per_step": -1}),
    "half a pass": ("backward_passes_per_step must be > 0", lambda m: {"backward_passes_per_step": 1.5}),
    "named_parameters without names": (
        r"named_parameters should be a sequence of tuples \(name, parameter\)",
        lambda m: {"named_parameters": m.parameters()},
    ),
    "named_parameters without parameters": (
        r"named_parameters should be a sequence of tuples \(name, parameter\)",
        lambda m: {"named_parameters": ["weight"]},
    ),
    "a name twice": (
        r"Parameter names in named_parameters must be unique\. Found duplicates: x",
        lambda m: {"named_parameters": [("x", p) for p in m.parameters()]},
    ),
    "a parameter without a name": (
        "named_parameters was specified, but one or more model parameters were not named",
        lambda m: {"named_parameters": list(m.named_parameters())[:1]},
    ),
    "no names at all": (
        "named_parameters was specified, but one or more model parameters were not named",
        lambda m: {"named_parameters": []},
    ),
    "groups of a word": (GROUPS, lambda m: {"groups": "two"}),
    "zero groups": (GROUPS, lambda m: {"groups": 0}),
    "fewer than no groups": (GROUPS, lambda m: {"groups": -1}),
    "one and a half groups": (GROUPS, lambda m: {"groups": 1.5}),
    "groups that are no list": (GROUPS, lambda m: {"groups": (m.weight,)}),
    "a list of tensors, not of lists": (GROUPS, lambda m: {"groups": [m.weight, m.bias]}),
    "groups of names": (r"groups must consist of torch\.Tensor\.", lambda m: {"groups": [["weight"]]}),
    "a parameter in two groups": (
        r"A parameter can only appear once in groups\.",
        lambda m: {"groups": [[m.weight], [m.bias, m.weight]]},
    ),
    "a parameter twice in a group": (
        r"A parameter can only appear once in groups\.",
        lambda m: {"groups": [[m.weight, m.weight]]},
    ),
    "no reduction": ("is not a reduction", lambda m: {"op": 17}),
    "an unregistered process set": ("is not registered", lambda m: {"process_set": hvd.ProcessSet([0])}),
}


def wrap(model: nn.Module, **keywords: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **keywords)


@pytest.mark.parametrize("condition", REFUSED)
def test_bad_arguments_are_refused(job: Any, condition: str) -> None:
    def check() -> None:
        text, arguments = REFUSED[condition]
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=text):
            wrap(model, **arguments(model))
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    job(2, check)


def test_predivide_is_refused_on_rocm(job: Any) -> None:
    def check() -> None:
        from horovod._bindings import reductions

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reductions, "rocm_built", lambda: True)
            with pytest.raises(ValueError, match="gradient_predivide_factor not supported yet with ROCm"):
                wrap(nn.Linear(2, 2), gradient_predivide_factor=2.0)
            wrap(nn.Linear(2, 2))

    job(2, check)


def test_adasum_within_a_process_set_is_refused(job: Any) -> None:
    def check(sets: Any) -> None:
        with pytest.raises(NotImplementedError, match="Adasum"):
            wrap(nn.Linear(2, 2), op=hvd.Adasum, process_set=sets[0])

    job(2, check, sets=[[0]])


def test_num_groups_is_deprecated_and_means_groups(job: Any) -> None:
    def check() -> None:
        for keywords, buckets in (({"num_groups": 3}, 3), ({"num_groups": 3, "groups": 2}, 2)):
            model = network()
            with pytest.warns(DeprecationWarning, match="num_groups") as caught:
                optimizer = wrap(model, **keywords)
            assert caught[0].filename.endswith("test_optimizer_arguments.py")
            before = submitted()
            train(model, optimizer, batches(3, 2, hvd.rank()))
            assert len({each.request.name for each in sent_gradients(before)}) == buckets
            assert_close(model, alone("sgd", 3, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrap(network(), num_groups=0, groups=2)
        with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match=GROUPS):
            wrap(network(), num_groups=-1)

    job(2, check)


def test_an_optimizer_that_is_distributed_already_is_refused(job: Any) -> None:
    def check() -> None:
        for op in (hvd.Average, hvd.Adasum):
            with pytest.raises(ValueError, match="already"):
                hvd.DistributedOptimizer(wrap(nn.Linear(2, 2), op=op))

    job(2, check)


def test_names_of_more_parameters_than_the_optimizer_has_are_taken(job: Any) -> None:
    def check() -> None:
        model = nn.Linear(2, 2)
        optimizer = wrap(model, named_parameters=[*model.named_parameters(), ("another", nn.Parameter(torch.ones(1)))])
        assert sorted(optimizer._parameter_names.values()) == ["another", "bias", "weight"]

    job(2, check)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_predivide_averages_without_overflow_in_half_precision(job: Any, size: int) -> None:
    """Also in groups, and so that half precision does not overflow on the way."""

    def check() -> None:
        for keywords in ({}, {"groups": 2}, {"groups": 2, "compression": hvd.Compression.fp16}):
            parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=1.0), gradient_predivide_factor=float(size), **keywords
            )
            assert optimizer.gradient_predivide_factor == size
            torch.stack([p * 60000 for p in parameters]).sum().backward()
            optimizer.step()
            for p in parameters:
                torch.testing.assert_close(p.detach(), torch.full_like(p, -60000.0), rtol=1e-3, atol=0.0)
        for maker in ("momentum", "adam"):
            model = network()
            optimizer = hvd.DistributedOptimizer(
                MAKERS[maker](model.parameters()), gradient_predivide_factor=0.5 * size, groups=2
            )
            train(model, optimizer, batches(3, size, hvd.rank()))
            assert_close(model, alone(maker, 3, size))

    job(size, check)


@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
def test_sparse_gradients_train_as_in_one_process_dense_or_in_groups(job: Any, bucket_bytes: str) -> None:
    """As they are, made dense, in groups, and with an optimizer that takes nothing else; one rank has none at first."""

    def build() -> nn.ModuleDict:
        torch.manual_seed(4)
        return nn.ModuleDict({"words": nn.Embedding(20, 5, sparse=True), "out": nn.Linear(5, 3)})

    def run(model: nn.ModuleDict, optimizers: list[Any], words: torch.Tensor, skip: bool) -> None:
        for number, row in enumerate(words):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if number > 0 or not skip:
                model["out"](model["words"](row)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    def check() -> None:
        words = torch.randint(0, 20, (4, 12), generator=torch.Generator().manual_seed(0))
        rank = hvd.rank()
        for wrapping in ({}, {"sparse_as_dense": True}, {"groups": 1}, {"groups": 2, "sparse_as_dense": True}):
            for adam in (False, True):
                if adam and "sparse_as_dense" in wrapping:
                    continue  # SparseAdam takes no dense gradients
                models = build(), build()
                for model, distributed in zip(models, (True, False), strict=True):
                    one: Any = (torch.optim.SparseAdam if adam else torch.optim.SGD)(
                        model["words"].parameters(), lr=0.05
                    )
                    two: Any = torch.optim.SGD(model["out"].parameters(), lr=0.01)
                    if distributed:
                        one = hvd.DistributedOptimizer(one, op=hvd.Sum, **wrapping)
                        two = hvd.DistributedOptimizer(two, op=hvd.Sum)
                    skip = adam and distributed and rank == 1
                    mine = words[:, 6 * rank : 6 * rank + 6] if distributed else words.clone()
                    if not distributed and adam:
                        run(model, [one, two], mine[:1, :6], False)
                        run(model, [one, two], mine[1:], False)
                    else:
                        run(model, [one, two], mine, skip)
                assert_close(*models)

    job(2, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})
