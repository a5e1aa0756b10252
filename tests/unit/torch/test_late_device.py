"""The stand-in for a device, on which tests of staging rely: what is not waited for is not there, and misuse is noticed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch takes no backend in Python", allow_module_level=True)

import late_device

LATE = "late:0"
late: Any = torch.late  # type: ignore[attr-defined]  # registered by late_device


@pytest.fixture(autouse=True)
def drained() -> Any:
    late_device.violations()
    yield
    late_device.drain()


@torch.no_grad()
def test_it_computes_what_the_host_computes() -> None:
    """Without autograd, which asks once, when it starts, which devices there are."""
    torch.manual_seed(1)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)), torch.randn(5, 4)
    wanted = model(x).square().sum(0)
    found = model.to(LATE)(x.to(LATE)).square().sum(0)
    assert found.device == torch.device(LATE)
    torch.testing.assert_close(found.cpu(), wanted)


def test_what_is_not_waited_for_is_not_there() -> None:
    gate = threading.Event()
    late.current_stream().push(after=gate)
    x = torch.full((3,), 5.0, device=LATE).add_(1)
    copy = torch.zeros(3)
    copy.copy_(x, non_blocking=True)
    assert copy.tolist() == [0, 0, 0] and x.inner.isnan().all()
    gate.set()
    assert x.tolist() == [6, 6, 6] and copy.tolist() == [6, 6, 6]


def test_streams_are_ordered_by_events_alone() -> None:
    gate, side = threading.Event(), late.Stream(LATE)
    x = torch.zeros(3, device=LATE)
    late.synchronize()
    late.current_stream().push(after=gate)
    x.add_(1)
    ready = late.current_stream().record_event()
    early, late_copy = torch.zeros(3), torch.zeros(3)
    with late.stream(side):
        early.copy_(x, non_blocking=True)
        seen = side.record_event()
    seen.synchronize()
    assert early.tolist() == [0, 0, 0] and not ready.query()
    with late.stream(side):
        side.wait_event(ready)
        late_copy.copy_(x, non_blocking=True)
    gate.set()
    side.synchronize()
    assert late_copy.tolist() == [1, 1, 1] and ready.query()


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_works_on(recorded: bool) -> None:
    gate, side = threading.Event(), late.Stream(LATE)
    x = torch.zeros(3, device=LATE)
    with late.stream(side):
        side.push(after=gate)
        x.add_(1)
    if recorded:
        x.record_stream(side)
    del x
    assert len(late_device.violations()) == (0 if recorded else 1)
    gate.set()


def test_an_error_shows_at_the_next_wait() -> None:
    def fail() -> None:
        raise ValueError("a kernel went wrong")

    late.current_stream().push(fail)
    with pytest.raises(RuntimeError, match="the device failed: a kernel went wrong"):
        late.synchronize()
    late.synchronize()
