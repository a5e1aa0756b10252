"""Models that reach their gradients in other ways: recomputed, compiled, in sixteen bits, of several types."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd
from part import some
from regression import MAKERS, Batch, assert_as_alone, assert_close, assert_same_on_all_ranks, batches, loss_of, network
from torch_versions import needs_sixteen_bits


class Recomputed(nn.Module):
    """Keeps no activations of its two blocks, and computes them anew in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # the reentrant kind sees no gradient otherwise
        for block in (self.layers[:2], self.layers[2:]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def train(model: nn.Module, optimizer: Any, data: list[Batch], _: bool) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing_trains_as_in_one_process(job: Any, reentrant: bool) -> None:
    def check() -> None:
        for maker in MAKERS.values():
            assert_as_alone(train, maker, steps=4, build=lambda: Recomputed(reentrant))

    job(2, check)
    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_reentrant_checkpointing_of_shared_parameters_trains_as_in_one_process(job: Any) -> None:
    """Every recomputed block adds to the gradient by itself, in a pass of its own."""

    class Shared(Recomputed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[:2](x)
            for _ in range(2):
                x = checkpoint(self.layers[2:4], x, use_reentrant=True)
            return self.layers[4](x)

    def patient(model: nn.Module, optimizer: Any, data: list[Batch], distributed: bool) -> None:
        for batch in data:
            optimizer.zero_grad()
            if distributed:
                with optimizer.no_sync():
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
            optimizer.step()

    def check() -> None:
        assert_as_alone(train, MAKERS["adam"], steps=3, build=lambda: Shared(True))
        assert_as_alone(patient, MAKERS["adam"], steps=3, build=lambda: Shared(True))

    job(2, check)


COMPILERS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None or importlib.util.find_spec("setuptools") is None,
            reason="inductor needs a C++ compiler",
        ),
    ),
]


@pytest.mark.parametrize("backend", some(COMPILERS, COMPILERS[:2]))
def test_compiled_models_train_as_in_one_process(job: Any, backend: str, tmp_path: Path) -> None:
    if backend == "inductor" and len(str(tmp_path).split()) > 1:
        pytest.skip("inductor's commands for the compiler do not quote the folder, whose name has blanks")

    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model.parameters()), model.named_parameters())
        train(torch.compile(model, backend=backend), optimizer, list(batches(4, 2, hvd.rank())), True)
        train(wanted, MAKERS["momentum"](wanted.parameters()), list(batches(4, 2)), False)
        assert_close(model, wanted)
        assert_same_on_all_ranks(model)
        torch.compiler.reset()

    # neither a process nor a file that outlives the test
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    job(2, check, env=env, timeout=240)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_parameters_in_sixteen_bits_get_the_float32_average_rounded_once(
    job: Any, size: int, dtype: torch.dtype
) -> None:
    """The reduced gradient is the float32 average, rounded once."""

    def check() -> None:
        parameter = nn.Parameter(torch.zeros(500, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        values = torch.randn(size, 500, generator=torch.Generator().manual_seed(2)).to(dtype)
        (parameter * values[hvd.rank()]).sum().backward()
        optimizer.synchronize()
        wanted = values.float().mean(0).to(dtype)
        # a sum in float32 times 1/size, or divided by it: the last bit of float32 may tip the rounding
        assert (parameter.grad == wanted).float().mean() > 0.98
        assert torch.allclose(parameter.grad.float(), wanted.float(), rtol=2e-2 if dtype == torch.bfloat16 else 2e-3)
        with optimizer.skip_synchronize():
            optimizer.step()

    job(size, check)


@needs_sixteen_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_models_in_sixteen_bits_train_close_to_one_process(job: Any, size: int, dtype: torch.dtype) -> None:
    def check() -> None:
        model, wanted_model = network().to(dtype), network().to(dtype)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), model.named_parameters()
        )
        other = torch.optim.AdamW(wanted_model.parameters(), lr=0.01, eps=1e-3)
        for which, stepper, data in (
            (model, optimizer, batches(3, size, hvd.rank())),
            (wanted_model, other, batches(3, size)),
        ):
            train(which, stepper, [(x.to(dtype), y.to(dtype)) for x, y in data], True)
        assert_close(model, wanted_model, rtol=5e-2, atol=3e-2)
        assert_same_on_all_ranks(model)

    job(size, check)


def test_one_optimizer_trains_parameters_of_three_types(job: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(9)
            self.narrow, self.single, self.wide = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.narrow.bfloat16()
            self.wide.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.single(self.narrow(x.bfloat16()).float()).tanh().double()).float()

    def check() -> None:
        for groups in (None, 1, 2):
            model, wanted = Mixed(), Mixed()
            optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), groups=groups)
            train(model, optimizer, list(batches(4, 2, hvd.rank())), True)
            train(wanted, MAKERS["sgd"](wanted.parameters()), list(batches(4, 2)), False)
            for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
                assert one.dtype == two.dtype and torch.allclose(one, two, rtol=2e-2, atol=1e-2)
            assert_same_on_all_ranks(model)

    job(2, check)


def test_a_model_that_is_moved_to_another_type_trains_on_as_in_one_process(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        other = MAKERS["sgd"](wanted.parameters())
        for dtype in (torch.float32, torch.float64, torch.float32):
            for which, stepper, rank in ((model, optimizer, hvd.rank()), (wanted, other, None)):
                which.to(dtype)
                train(which, stepper, [(x.to(dtype), y.to(dtype)) for x, y in batches(2, 2, rank)], True)
        assert_close(model, wanted)

    job(2, check)
