"""Copies of a state on a device, which go on beside the device's work: what writes to the state waits, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.utils.backend_registration

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch takes no backend in Python", allow_module_level=True)

import late_device
from horovod.torch.elastic import snapshot
from horovod.torch.elastic.handlers import ModelStateHandler, OptimizerStateHandler


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshot, "DEVICES", {"late"})
    monkeypatch.setattr(snapshot, "KINDS", {torch.Tensor, late_device.LateTensor})
    monkeypatch.setattr(snapshot, "page_locked_like", lambda each: torch.full(each.shape, 77, dtype=each.dtype))
    late_device.violations()
    yield
    late_device.drain()
    assert not late_device.violations()


def test_a_copy_is_of_what_was_there_when_it_began() -> None:
    tensors = [torch.arange(5.0).to("late:0"), torch.ones(3, device="late:0")]
    kept = snapshot.Snapshot()
    for turn in range(20):
        kept.take({"tensors": tensors})
        kept.before_write()
        for tensor in tensors:
            tensor.add_(1)
        first, second = kept.value()["tensors"]
        assert first.tolist() == [turn + each for each in range(5)]
        assert second.tolist() == [turn + 1.0] * 3


def test_a_step_waits_until_its_parameters_are_copied() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(2, 3).to("late:0"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    parameters, steps = ModelStateHandler(model), OptimizerStateHandler(optimizer)
    steps.also_before_step = [parameters.parameters]
    for turn in range(20):
        model.weight.grad = torch.ones(2, 3).to("late:0")
        parameters.save()
        steps.save()
        optimizer.step()
        assert parameters.parameters.value()["weight"].tolist() == [[-float(turn)] * 3] * 2
    parameters.restore()
    assert model.weight.detach().cpu().tolist() == [[-19.0] * 3] * 2
