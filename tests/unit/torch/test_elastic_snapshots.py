"""Copies of a state: right, independent of what they were made of, and in memory that is kept."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch

from horovod.torch.elastic.snapshot import Snapshot


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [each for part in parts for each in tensors_of(part)]


def trained(optimizer_class: Any = torch.optim.Adam) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def test_it_holds_what_the_state_was() -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": [1, (2.0, {"a": {3}})]}
    wanted = copy.deepcopy(state)
    snapshot = Snapshot()
    snapshot.take(state)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    found = snapshot.value()
    for one, two in zip(tensors_of(found), tensors_of(wanted), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert found["odd"] == wanted["odd"]
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert isinstance(found["model"], OrderedDict)
    assert found["model"]._metadata == wanted["model"]._metadata, "module versions decide how a state is loaded"
    model.load_state_dict(found["model"])


def test_the_next_copy_goes_to_the_same_memory() -> None:
    model, optimizer = trained()
    snapshot = Snapshot()
    snapshot.take(optimizer.state_dict())
    before = [each.data_ptr() for each in tensors_of(snapshot.value())]
    step(model, optimizer)
    snapshot.take(optimizer.state_dict())
    assert [each.data_ptr() for each in tensors_of(snapshot.value())] == before
    for one, two in zip(tensors_of(snapshot.value()), tensors_of(optimizer.state_dict()), strict=True):
        assert torch.equal(one, two) and one.data_ptr() != two.data_ptr()


def test_a_state_that_has_another_shape_or_type_is_copied_anew() -> None:
    snapshot = Snapshot()
    for value in (torch.ones(3), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16), {"a": torch.zeros(0)}):
        snapshot.take(value)
        for one, two in zip(tensors_of(snapshot.value()), tensors_of(value), strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two)
    snapshot.take({})
    assert snapshot.value() == {}


def test_tensors_of_odd_kinds_are_copied() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    values = [
        base.t(),
        base[:, 1],
        torch.ones(1).expand(5),
        base.to_sparse(),
        torch.nn.Parameter(base),
        torch.complex(base, base).conj(),
        torch.tensor(3),
    ]
    snapshot = Snapshot()
    for _ in range(2):
        snapshot.take(values)
        for one, two in zip(snapshot.value(), values, strict=True):
            assert torch.equal(one.to_dense(), two.detach().to_dense())
            assert not one.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_device_waits_until_the_parameters_are_copied() -> None:
    from horovod.torch.elastic.handlers import ModelStateHandler, OptimizerStateHandler

    model = torch.nn.Linear(2000, 2000).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model_handler, optimizer_handler = ModelStateHandler(model), OptimizerStateHandler(optimizer)
    optimizer_handler.also_before_step = [model_handler.parameters]
    for _ in range(20):
        torch.cuda.synchronize()
        wanted = [each.clone() for each in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model_handler.save()
        optimizer_handler.save()
        optimizer.step()
        kept = model_handler.parameters.value()
        assert all(each.is_pinned() for each in kept.values())
        for one, two in zip(kept.values(), wanted, strict=True):
            assert torch.equal(one.cuda(), two)
    model_handler.restore()
    optimizer_handler.restore()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), wanted, strict=True))
