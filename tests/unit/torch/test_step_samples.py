"""What a step looks at in a tensor is the same however its memory is read: by NumPy, or by copies from a device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison import samples
from horovod.comparison.looks import Looks, looks_in
from horovod.comparison.samples import Samples, StepLooks
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.step_samples import (
    Chosen,
    DeviceCopies,
    StepPlace,
    StepSampler,
    TensorLook,
    form_of,
    seen_in_host_memory,
)
from horovod.torch.storage_references import is_alone

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(1, 30), max_size=3)


@st.composite
def choices(draw: st.DrawFn) -> Chosen:
    """A dense tensor of any layout and type, which begins anywhere in its storage."""
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    storage = torch.randn(count + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    tensor = storage.to(draw(st.sampled_from(KINDS)))[draw(st.integers(0, 5)) :][:count].view(shape)
    return chosen(tensor.permute(draw(st.permutations(range(len(shape))))), draw(st.integers(1, 70)))


def chosen(tensor: torch.Tensor, number: int = 1) -> Chosen:
    form = form_of(tensor)
    assert form is not None
    return tensor, TensorLook("weight", number, False, form)


def places() -> st.SearchStrategy[StepPlace]:
    return st.builds(StepPlace, st.integers(0, 1 << 56), st.integers(0, 10**6), st.integers(0, 3))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have what devices have: a stream, whose events have come."""
    event = SimpleNamespace(query=lambda: True)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: stream, raising=False)


@given(st.lists(choices(), min_size=1, max_size=6), places())
def test_copies_from_a_device_are_what_is_read_of_host_memory(found: list[Chosen], place: StepPlace) -> None:
    copies = DeviceCopies.of(found, place)
    assert copies is not None
    late, seen = copies.read(), seen_in_host_memory(found, place)
    assert late is not None and late.amount == seen.amount == len(found)
    copied, read = late.looks(), seen.looks()
    assert (copied.tags, copied.labels) == (read.tags, read.labels)
    np.testing.assert_array_equal(copied.values, read.values)


@given(choices(), places())
def test_a_look_reads_a_part_of_the_memory(choice: Chosen, place: StepPlace) -> None:
    tensor, look = choice
    in_memory = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    begin, apart = place.part(look.number, tensor.numel())
    part = in_memory[begin::apart].clone()
    assert seen_in_host_memory([choice], place).content == part.view(torch.uint8).numpy().tobytes()


def test_nothing_keeps_the_memory_of_a_gradient() -> None:
    gradient = torch.randn(4)
    seen = seen_in_host_memory([chosen(gradient)], StepPlace(1, 2, 0))
    assert seen.amount == 1 and is_alone(gradient)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(4)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(1, dtype=torch.complex64).conj().imag,
    ],
)
def test_what_is_not_dense_or_real_or_as_in_memory_is_not_compared(tensor: torch.Tensor) -> None:
    assert form_of(tensor) is None


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
        def offer(self, offer: StepLooks) -> None:
            found = offer.read()
            assert found is not None
            looks: Looks = found.looks()
            for tag, (element, *_) in zip(looks.tags, looks.values, strict=True):
                seen["parameters" if tag & 1 else "gradients"].add(float(element))

    kept = Kept(0)
    owner = kept.owner("net", "the optimizer")
    sampler.begin("net")

    def take(step: int) -> None:
        if looks_in(step, sampler.number):
            sampler.take(kept, owner, step, (1 << 70) - 1, True)

    for step in range(50):
        take(step)
    assert seen["parameters"] == {float(number) for number in range(70)}
    for step in range(50, 1000):
        take(step)
    assert seen["gradients"] == {-float(number + 1) for number in range(70)}
