"""What a step looks at in a tensor is the same however its memory is read: by NumPy, or by copies from a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison import samples
from horovod.comparison.looks import Looks, Part, looks_at, part_of
from horovod.comparison.samples import Owner, Samples
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.step_samples import DeviceCopies, Place, StepSampler, elements_at

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(1, 30), max_size=3)


@st.composite
def places(draw: st.DrawFn) -> Place:
    """A part of a dense tensor of any layout and type, which begins anywhere in its storage."""
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    storage = torch.randn(count + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    tensor = storage.to(draw(st.sampled_from(KINDS)))[draw(st.integers(0, 5)) :][:count].view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    at = draw(st.integers(0, 10**6))
    return Place(1, "weight", tensor, at, *part_of(count, at))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have what devices have: a stream, whose events have come."""
    event = SimpleNamespace(query=lambda: True)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: stream, raising=False)


@given(st.lists(places(), min_size=1, max_size=6))
def test_copies_from_a_device_are_what_numpy_reads(found: list[Place]) -> None:
    copies = DeviceCopies.of(found, torch.device("cpu"))
    assert copies is not None
    read = looks_at([Part(each.tag, each.label, elements_at(each), each.at) for each in found])
    copied = copies.read()
    assert copied is not None and (copied.tags, copied.labels) == (read.tags, read.labels)
    np.testing.assert_array_equal(copied.values, read.values)


@given(places())
def test_a_look_reads_a_part_of_the_memory(place: Place) -> None:
    tensor = place.tensor
    in_memory = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).double().numpy()
    np.testing.assert_array_equal(elements_at(place), in_memory[place.begin :: place.apart])


def test_every_gradient_and_every_parameter_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "running", lambda: SimpleNamespace(joins=0, generation=1))
    slots = []
    for number in range(70):
        slot = ParameterState(torch.nn.Parameter(torch.full((3,), float(number))), f"weight {number}")
        slot.bit = 1 << number
        slot.parameter.grad = torch.full((3,), -float(number + 1))
        slots.append(slot)
    sampler = StepSampler()
    sampler.renumbered(slots)
    seen: dict[str, set[float]] = {"parameters": set(), "gradients": set()}

    class Kept(Samples):
        def offer(self, offer: Any) -> None:
            looks: Looks = offer.read()
            for tag, (element, *_) in zip(looks.tags, looks.values, strict=True):
                seen["parameters" if tag & 1 else "gradients"].add(float(element))

    kept, owner = Kept(0), Owner("net", 5, "the optimizer")
    for step in range(50):
        sampler.take(kept, owner, step, (1 << 70) - 1, True)
    assert seen["parameters"] == {float(number) for number in range(70)}
    for step in range(50, 1000):
        sampler.take(kept, owner, step, (1 << 70) - 1, True)
    assert seen["gradients"] == {-float(number + 1) for number in range(70)}
