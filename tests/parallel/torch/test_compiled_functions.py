"""Collectives and optimizers inside functions that PyTorch compiles: they work, and no code of this package is compiled."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import horovod
import horovod.torch as hvd

PACKAGE = str(Path(horovod.__file__).parent) + "/"
QUERIES = {"check_extension", "handle_average_backwards_compatibility"}
"""Functions of the binding that neither communicate nor wait."""

AROUND = re.compile(r"(\.|_resume_in_|<resume in )(step|zero_grad|forward)(_at_\d+|>)?$")
"""Methods that call those of the wrapped optimizer and the original layer, and what the compiler makes of their rest."""


def is_excluded(function: Any) -> bool:
    return getattr(function, "_torchdynamo_disable", False) is True


def compiled_functions() -> set[str]:
    """The functions of this package that PyTorch has compiled in this process."""
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    ours = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType and each.__code__.co_filename.startswith(PACKAGE)
    ]
    assert ours
    return {f"{each.__module__}.{each.__qualname__}" for each in ours if entries(each.__code__)}


def test_every_public_function_that_communicates_is_excluded() -> None:
    functions = {name: getattr(hvd, name) for name in hvd.__all__ if isinstance(getattr(hvd, name), FunctionType)}
    of_torch = {name for name, each in functions.items() if each.__module__.startswith("horovod.torch")}
    makers = {"DistributedOptimizer", "LocalOptimizer"}
    assert len(of_torch) > 30
    assert {name for name in of_torch if not is_excluded(functions[name])} == (QUERIES & of_torch) | makers
    shared = ("allgather_object", "broadcast_object", "add_process_set", "host_process_set", "remove_process_set")
    assert all(is_excluded(getattr(hvd, name)) for name in (*shared, "start_timeline", "stop_timeline"))
    assert not any(
        is_excluded(each) for each in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_initialized)
    )
    autograd = [
        getattr(hvd, name) for name in hvd.__all__ if name.startswith("Horovod") and name != "HorovodInternalError"
    ]
    assert len(autograd) == 8 and all(is_excluded(each.forward) and is_excluded(each.backward) for each in autograd)


def allreduce(x: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce(2 * x, name="compiled", op=hvd.Sum) + 1


def unnamed(x: torch.Tensor) -> torch.Tensor:
    hvd.barrier()
    return hvd.allreduce(2 * x, op=hvd.Sum) + 1


def asynchronous(x: torch.Tensor) -> torch.Tensor:
    twice = 2 * x
    handle = hvd.allreduce_async_(twice, op=hvd.Sum)
    other = hvd.broadcast_async(x, 0)
    hvd.poll(handle)
    return hvd.synchronize(handle) + hvd.synchronize(other)


def grouped(x: torch.Tensor) -> torch.Tensor:
    first, second = hvd.grouped_allreduce([x, x + 1], op=hvd.Sum)
    return first + second - 1


def gathered(x: torch.Tensor) -> torch.Tensor:
    return 2 * hvd.allgather(x[None], name="rows").sum(0) + 1


def scattered(x: torch.Tensor) -> torch.Tensor:
    return 2 * hvd.reducescatter(torch.stack([x] * hvd.size()), op=hvd.Sum)[0] + 1


def exchanged(x: torch.Tensor) -> torch.Tensor:
    return 2 * hvd.alltoall(torch.stack([x] * hvd.size()), name="rows").sum(0) + 1


def object_of_root(x: torch.Tensor) -> torch.Tensor:
    return 7 * hvd.broadcast_(torch.full_like(x, hvd.broadcast_object(hvd.rank() + 1.0, 0)), 0)


def differentiated(x: torch.Tensor) -> torch.Tensor:
    parameter = x.detach().requires_grad_()
    hvd.allreduce(3.5 * parameter, op=hvd.Sum).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize(
    "function",
    [allreduce, unnamed, asynchronous, grouped, gathered, scattered, exchanged, object_of_root, differentiated],
    ids=lambda each: each.__name__,
)
def test_collectives_run_in_a_compiled_function(job: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def check() -> None:
        for rows in range(1, 30):  # what the collectives keep would take the compiler longer, the more there is of it
            hvd.allreduce(torch.ones(rows))
        compiled = torch.compile(function, backend="eager")
        try:
            for _ in range(20):
                assert compiled(torch.full((4,), hvd.rank() + 1.0)).tolist() == [7.0] * 4
            assert not compiled_functions()
        finally:
            torch.compiler.reset()

    job(2, check)


@pytest.mark.parametrize("wrapped", ["DistributedOptimizer", "Adasum", "SyncBatchNorm"])
def test_a_compiled_step_compiles_nothing_of_the_reduction(job: Any, wrapped: str) -> None:
    """The code around what the optimizer and the layer are derived from may be in its graphs."""

    def check() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4) if wrapped == "SyncBatchNorm" else nn.Tanh())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        op = hvd.Adasum if wrapped == "Adasum" else hvd.Average
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        compiled = torch.compile(step, backend="eager")
        try:
            for _ in range(4):
                compiled(torch.rand(5, 3) + hvd.rank())
            assert all(AROUND.search(each) for each in compiled_functions()), compiled_functions()
        finally:
            torch.compiler.reset()
        return [each.detach() for each in model.parameters()]

    first, second = job(2, check)
    assert all(map(torch.equal, first, second))
