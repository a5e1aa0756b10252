"""Looks at gradients and parameters of an optimizer, at rotating places, just before it steps.

:mod:`horovod.comparison.samples` compares them with those of the other ranks. Sparse and complex gradients and parameters are
not compared, nor are those of kinds of devices that PyTorch has no streams for.

Most steps look at nothing, and the others at a few tensors, however many the optimizer has. In host memory they are read by
NumPy, which keeps Python's lock: calls of PyTorch release it, and another thread may take it for some milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.comparison.looks import GRADIENTS, Looks, Part, looks_at, part_of, place_of, tag_of, tensors_in_step
from horovod.comparison.precision import Precision
from horovod.comparison.samples import Owner, Samples, StepLooks
from horovod.torch.optimizer.buckets import ParameterState

_PRECISIONS = {
    torch.float64: Precision.DOUBLE,
    torch.float32: Precision.SINGLE,
    torch.float16: Precision.HALF,
    torch.bfloat16: Precision.BRAIN,
}
_CLASSES = (torch.nn.Parameter, torch.Tensor)
"""Other classes, such as DTensor, may have their elements elsewhere."""


class Place(msgspec.Struct, gc=False):
    """Some elements of a tensor that a step looks at: from ``begin`` on, each ``apart`` from the next, in its memory."""

    tag: int
    label: str
    tensor: torch.Tensor
    at: int
    begin: int
    apart: int


class StepSampler:
    """Chooses what is looked at in each step. The choice follows from the optimizer's steps and from which gradients were
    reduced, which all ranks know.

    Every parameter has its turn once, then all have it again.
    """

    def __init__(self) -> None:
        self._waiting = 0  # the set of slots that have not had their turn
        self._slots: list[ParameterState] = []
        self._step, self._times = -1, 0

    def begin(self) -> None:
        """Begin to count from 0, as all ranks do."""
        self._waiting = 0
        self._step = -1

    def renumbered(self, slots: Sequence[ParameterState]) -> None:
        """Take over the slots of the optimizer, of which some are new or gone."""
        self._slots = list(slots)
        self._waiting = 0

    def take(self, samples: Samples, owner: Owner, step: int, reduced: int, parameters: bool) -> None:
        """Look at gradients and parameters that the optimizer is about to step with.

        Args:
            step: how many steps it has made.
            reduced: the set of slots whose gradients were reduced for this step.
            parameters: whether parameters must be the same on all ranks.
        """
        self._times = self._times + 1 if step == self._step else 0  # a closure may be called several times in a step
        self._step = step
        count = tensors_in_step(step, owner.number, len(self._slots))
        if not count:
            return
        places: list[Place] = []
        first = place_of(step, 0)
        for turn in range(first, first + min(count, reduced.bit_count())):
            slot = self._next(reduced)
            reduced &= ~slot.bit
            if not slot.parameter.requires_grad:
                continue
            if turn % count < GRADIENTS and slot.parameter.grad is not None:
                places += self._places(slot, slot.parameter.grad, owner, step, False)
            if parameters:
                places += self._places(slot, slot.parameter, owner, step, True)
        if not places:
            return
        device = places[0].tensor.device
        places = [each for each in places if each.tensor.device == device]
        if device.type == "cpu":
            looks = looks_at([Part(each.tag, each.label, elements_at(each), each.at) for each in places])
            samples.offer(StepLooks(owner, step + 1, len(self._slots), lambda: looks))
        elif (copies := DeviceCopies.of(places, device)) is not None:
            samples.offer(StepLooks(owner, step + 1, len(self._slots), copies.read, late=True))

    def _next(self, among: int) -> ParameterState:
        if not self._waiting & among:
            self._waiting |= among
        candidates = self._waiting & among
        bit = candidates & -candidates
        self._waiting &= ~bit
        return self._slots[bit.bit_length() - 1]

    def _places(
        self, slot: ParameterState, tensor: torch.Tensor, owner: Owner, step: int, is_parameter: bool
    ) -> Sequence[Place]:
        precision, count, number = _PRECISIONS.get(tensor.dtype), tensor.numel(), slot.bit.bit_length()
        if precision is None or not count or type(tensor) not in _CLASSES or tensor.layout is not torch.strided:
            return ()
        at = place_of(step, number)
        begin, apart = part_of(count, at)
        where: tuple[int, ...] = (owner.number, step, self._times, number, count, begin)
        if not tensor.is_contiguous():
            if not _is_dense(tensor):
                return ()
            where += tensor.stride()
        return (Place(tag_of(precision, is_parameter, *where), slot.name, tensor, at, begin, apart),)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no elements share memory, and there are no gaps between them."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def elements_at(place: Place) -> Array:
    """The elements of a tensor in host memory."""
    tensor = place.tensor
    if tensor.dtype is torch.bfloat16:  # which NumPy lacks: the upper half of float32
        halves = tensor.detach().view(torch.int16).numpy().ravel("K")[place.begin :: place.apart]
        return (halves.astype(np.int32) << 16).view(np.float32)
    return tensor.numpy(force=True).ravel("K")[place.begin :: place.apart]


class DeviceCopies:
    """Elements on their way from a device, in one tensor. The script does not wait for them."""

    def __init__(self, places: Sequence[Place], lengths: Sequence[int], joined: torch.Tensor, arrived: Any) -> None:
        self._places, self._lengths, self._joined, self._arrived = places, lengths, joined, arrived

    @classmethod
    def of(cls, places: Sequence[Place], device: torch.device) -> DeviceCopies | None:
        """Begin to copy. None if a graph is being captured, or if the kind of device has no streams."""
        module: Any = getattr(torch, device.type, None)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is None or capturing():
            return None
        lengths = [-(-(each.tensor.numel() - each.begin) // each.apart) for each in places]
        with torch.no_grad():
            parts = [
                each.tensor.as_strided((length,), (each.apart,), each.tensor.storage_offset() + each.begin)
                for each, length in zip(places, lengths, strict=True)
            ]
            joined = torch.cat(parts)  # of their common type, which is exact
            target = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=device.type == "cuda")
            target.copy_(joined, non_blocking=True)
        return cls(places, lengths, target, module.current_stream(device).record_event())

    def read(self) -> Looks | None:
        if not self._arrived.query():
            return None
        values = self._joined.double().numpy()
        ends = accumulate(self._lengths)
        return looks_at(
            [
                Part(each.tag, each.label, values[end - length : end], each.at)
                for each, length, end in zip(self._places, self._lengths, ends, strict=True)
            ]
        )
