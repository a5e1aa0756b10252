"""Looks at gradients and parameters of an optimizer, at rotating places, just before it steps.

:mod:`horovod.comparison.samples` compares them with those of the other ranks. Sparse and complex gradients and parameters are
not compared, nor are those of kinds of devices that PyTorch has no streams for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.comparison.precision import Precision
from horovod.comparison.samples import (
    Owner,
    Samples,
    StepLooks,
    TensorLook,
    look,
    part_of,
    place_of,
    tag_of,
)
from horovod.torch.optimizer.buckets import Slot

_FEW = 50
"""Up to this number of parameters, one is looked at in a step, otherwise two."""
_PRECISIONS = {
    torch.float64: Precision.DOUBLE,
    torch.float32: Precision.SINGLE,
    torch.float16: Precision.HALF,
    torch.bfloat16: Precision.BRAIN,
}


class _Place(NamedTuple):
    """Some elements of a tensor that a step looks at, a view of it."""

    tag: int
    label: str
    values: torch.Tensor
    at: int


class StepSampler:
    """Chooses what is looked at in each step. The choice follows from the optimizer's steps and from which gradients were
    reduced, which all ranks know.

    Every parameter has its turn once, then all have it again. So each is looked at within the larger of 50 and half as many
    steps as there are parameters.
    """

    def __init__(self) -> None:
        self._waiting = 0  # the set of slots that have not had their turn
        self._slots: list[Slot] = []
        self._step, self._times = -1, 0

    def begin(self) -> None:
        """Begin to count from 0, as all ranks do."""
        self._waiting = 0
        self._step = -1

    def renumbered(self, slots: Sequence[Slot]) -> None:
        """Take over the slots of the optimizer, of which some are new or gone."""
        self._slots = list(slots)
        self._waiting = 0

    def take(self, samples: Samples, owner: Owner, step: int, reduced: int, parameters: bool) -> None:
        """TensorLook at gradients and parameters that the optimizer is about to step with.

        Args:
            step: how many steps it has made.
            reduced: the set of slots whose gradients were reduced for this step.
            parameters: whether parameters must be the same on all ranks.
        """
        self._times = self._times + 1 if step == self._step else 0  # a closure may be called several times in a step
        self._step = step
        places: list[_Place] = []
        for _ in range(min(1 if len(self._slots) <= _FEW else 2, reduced.bit_count())):
            slot = self._next(reduced)
            reduced &= ~slot.bit
            if slot.parameter.requires_grad:
                places += self._places(slot, owner, step, parameters)
        if not places:
            return
        device = places[0].values.device
        places = [each for each in places if each.values.device == device]
        if device.type == "cpu":
            looks = _read(places)
            samples.offer(StepLooks(owner, step + 1, len(self._slots), lambda: looks))
        elif (copies := _Copies.of(places, device)) is not None:
            samples.offer(StepLooks(owner, step + 1, len(self._slots), copies.read, late=True))

    def _next(self, among: int) -> Slot:
        if not self._waiting & among:
            self._waiting |= among
        candidates = self._waiting & among
        bit = candidates & -candidates
        self._waiting &= ~bit
        return self._slots[bit.bit_length() - 1]

    def _places(self, slot: Slot, owner: Owner, step: int, parameters: bool) -> list[_Place]:
        found = []
        number = slot.bit.bit_length()
        at = place_of(step, number)
        for is_parameter, tensor in ((False, slot.parameter.grad), (True, slot.parameter if parameters else None)):
            if tensor is None or tensor.layout is not torch.strided or not (count := tensor.numel()):
                continue
            precision = _PRECISIONS.get(tensor.dtype)
            flat = _flat(tensor.detach(), count)
            if precision is None or flat is None:
                continue
            begin, apart = part_of(count, at)
            where = (owner.number, step, self._times, number, count, begin, *tensor.stride())
            values = flat[begin::apart] if apart > 1 else flat
            found.append(_Place(tag_of(precision, is_parameter, *where), slot.name, values, at))
        return found


def _flat(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    """All elements of a tensor in the order of its memory, as a view; None if some share memory or have gaps between them."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None  # a DTensor, or another class that may have its elements elsewhere
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return None
            expected *= length
    return tensor.as_strided((count,), (1,))


def _read(places: Sequence[_Place]) -> list[TensorLook]:
    with np.errstate(all="ignore"):
        return [look(tag, label, _array(values), at) for tag, label, values, at in places]


def _array(values: torch.Tensor) -> Array:
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


class _Copies:
    """Elements on their way from a device. The script does not wait for them."""

    def __init__(self, places: Sequence[_Place], arrived: Any) -> None:
        self._places, self._arrived = places, arrived

    @classmethod
    def of(cls, places: Sequence[_Place], device: torch.device) -> _Copies | None:
        """Begin to copy. None if a graph is being captured, or if the kind of device has no streams."""
        module: Any = getattr(torch, device.type, None)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is None or capturing():
            return None
        copied = []
        for each in places:
            target = torch.empty(each.values.shape, dtype=each.values.dtype, pin_memory=device.type == "cuda")
            copied.append(each._replace(values=target.copy_(each.values, non_blocking=True)))
        return cls(copied, module.current_stream(device).record_event())

    def read(self) -> list[TensorLook] | None:
        return _read(self._places) if self._arrived.query() else None
