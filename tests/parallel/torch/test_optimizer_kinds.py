"""Unusual parameters and optimizers: complex, sparse, swapped, sharded; with a ``param_groups`` of their own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from dtensors import spread_over_a_mesh
from regression import MAKERS, assert_close, assert_same_on_all_ranks, batches, network, train
from torch_versions import needs_swapping


@pytest.mark.parametrize("compression", ["none", "bf16", "powersgd"])
def test_complex_parameters_are_averaged_summed_and_combined_beside_real_ones(job: Any, compression: str) -> None:
    """As pairs of reals; also beside real ones, through views that PyTorch keeps conjugated, and with a hook that clips."""

    def check() -> None:
        kind = getattr(hvd.Compression, compression)
        for op in (hvd.Average, hvd.Sum, hvd.Adasum):
            if op == hvd.Adasum and compression == "powersgd":
                continue
            torch.manual_seed(1)
            values = torch.randn(2, 3, 4, dtype=torch.complex64)
            parameter, real = nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64)), nn.Parameter(torch.zeros(4))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter, real], lr=1.0),
                compression=kind(4) if compression == "powersgd" else kind,
                op=op,
            )
            for _ in range(2):
                optimizer.zero_grad()
                mine = values[0 if op == hvd.Adasum else hvd.rank()]
                ((parameter * mine).sum().real + real.sum()).backward()
                optimizer.step()
            wanted = -2 * {hvd.Average: values.mean(0), hvd.Sum: values.sum(0)}.get(op, values[0]).conj()
            atol = 1e-5 if compression == "none" else 5e-2
            torch.testing.assert_close(parameter.detach(), wanted.resolve_conj(), rtol=1e-2, atol=atol)
            assert real.unique().tolist() == [-4.0 if op == hvd.Sum else -2.0]

    job(2, check)


def test_complex_parameters_are_refused_where_the_reduction_needs_an_order(job: Any) -> None:
    def check() -> None:
        for op in (hvd.Min, hvd.Max, hvd.Product):
            parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
            with pytest.raises(ValueError, match=rf"'phase' is complex.*not hvd\.{op.label}"):
                hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("phase", parameter)], op=op)
            assert not parameter._post_accumulate_grad_hooks

    job(2, check)


def test_a_sparse_optimizer_gets_sparse_gradients_though_they_travel_dense(job: Any) -> None:
    """SparseAdam takes nothing but sparse gradients; one rank has none in the second step."""

    def run(words: nn.Module, optimizer: Any, rows: list[list[int]]) -> None:
        for row in rows:
            optimizer.zero_grad()
            if row:
                words(torch.tensor(row)).square().sum().backward()
            optimizer.step()

    def check() -> None:
        models = []
        for distributed in (True, False):
            torch.manual_seed(4)
            words = nn.Embedding(10, 3, sparse=True)
            optimizer: Any = torch.optim.SparseAdam(list(words.parameters()), lr=0.1)
            rows = [[[1, 2], [3], [5]], [[2, 4], [], [5]]]
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, sparse_as_dense=True)
            mine = rows[hvd.rank()] if distributed else [one + two for one, two in zip(*rows, strict=True)]
            run(words, optimizer, mine)
            assert words.weight.grad.is_sparse
            models.append(words)
        assert_close(*models)
        assert_same_on_all_ranks(models[0])

    job(2, check)


@needs_swapping
def test_a_model_whose_parameters_were_swapped_is_still_reduced(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        other = MAKERS["sgd"](wanted.parameters())
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            for dtype in (torch.float64, torch.float32):
                for which, stepper, rank in ((model, optimizer, hvd.rank()), (wanted, other, None)):
                    which.to(dtype)
                    train(which, stepper, ((x.to(dtype), y.to(dtype)) for x, y in batches(2, 2, rank)))
                assert model[0].weight.dtype == dtype
                gradient = model[0].weight.grad.tolist()
                optimizer.zero_grad()
                x, y = next(batches(1, 2, hvd.rank()))
                nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
                gradient = model[0].weight.grad.tolist()
                assert hvd.allgather_object(gradient) == [gradient] * 2  # the hooks are heard
                optimizer.zero_grad()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert_close(model, wanted)

    job(2, check)


@needs_swapping
def test_two_passes_over_swapped_parameters_are_summed_once(job: Any) -> None:
    def check() -> None:
        weight = nn.ParameterList([nn.Parameter(torch.ones(3))])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weight.parameters(), lr=0.1), op=hvd.Sum)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            weight.to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        optimizer.zero_grad()
        for _ in range(2):
            (weight[0] * 2).sum().backward()
        assert weight[0].grad is not None
        assert weight[0].grad.tolist() == [8.0] * 3
        optimizer.step()

    job(2, check)


def test_sharded_parameters_are_refused(job: Any) -> None:
    def check() -> None:
        sharded = nn.Parameter(spread_over_a_mesh())
        with pytest.raises(ValueError, match=r"'layer\.weight' is a DTensor: FSDP2(.|\n)*without"):
            hvd.DistributedOptimizer(torch.optim.SGD([sharded], lr=0.1), [("layer.weight", sharded)])

    job(1, check)


class Nested(torch.optim.Optimizer):
    """Steps by an optimizer of its own, whose groups are its groups."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.defaults = self.inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_an_optimizer_whose_groups_are_a_property_trains_and_keeps_them(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(Nested(model.parameters()), model.named_parameters())
        train(model, optimizer, batches(2, 2, hvd.rank()))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, batches(2, 2, hvd.rank()))
        assert optimizer.param_groups is optimizer.inner.param_groups
        other = MAKERS["sgd"](wanted.parameters())
        for _ in range(2):
            train(wanted, other, batches(2, 2))
        assert_close(model, wanted)

    job(2, check)


def test_zero_grad_names_its_argument(job: Any) -> None:
    """Accelerate looks whether it may pass it."""

    def check() -> None:
        for op in (hvd.Average, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](network().parameters()), op=op)
            assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters

    job(2, check)


def test_adasum_calls_step_hooks_once_with_many_buckets(job: Any) -> None:
    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model.parameters()), op=hvd.Adasum)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        train(model, optimizer, batches(2, 2, hvd.rank()))
        assert seen == ["before", "after"] * 2

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})
