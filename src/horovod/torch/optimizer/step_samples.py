"""Looks at gradients and parameters of an optimizer, at rotating places, just before it steps.

:mod:`horovod.comparison.samples` compares them with those of the other ranks. Sparse and complex gradients and parameters are
not compared, nor are those of kinds of devices that PyTorch has no streams for.

Most steps look at nothing, and the others at a few tensors, however many the optimizer has. A look only copies bytes: what they
amount to is computed if the ranks have different ones. Host memory is read by address: most calls of PyTorch release Python's
lock, and another thread may take it for some milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.comm.spans import bytes_at
from horovod.comparison.looks import (
    ELEMENTS,
    GRADIENTS,
    Looks,
    Part,
    Seen,
    looks_at,
    part_of,
    place_of,
    tag_of,
    tensors_in_step,
)
from horovod.comparison.precision import Precision
from horovod.comparison.samples import Owner, Samples, StepLooks, number_of
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.tensors import DATA_TYPES

_PRECISIONS = {
    torch.float64: Precision.DOUBLE,
    torch.float32: Precision.SINGLE,
    torch.float16: Precision.HALF,
    torch.bfloat16: Precision.BRAIN,
}
_KINDS = {kind: (precision, DATA_TYPES[kind].numpy) for kind, precision in _PRECISIONS.items()}
_CLASSES = (torch.nn.Parameter, torch.Tensor)
"""Other classes, such as DTensor, may have their elements elsewhere."""


class Form(msgspec.Struct, gc=False):
    """The elements of a dense tensor, and how they lie in its memory.

    Attributes:
        precision, dtype: their type.
        count: how many there are.
        strides: empty for a contiguous tensor.
    """

    precision: Precision
    dtype: np.dtype[Any]
    count: int
    strides: tuple[int, ...] = ()

    def read(self, address: int, begin: int, apart: int) -> bytes:
        """Some elements of a tensor of this form at an address in host memory: from ``begin`` on, each ``apart`` from the
        next, in the order of the memory."""
        length = self.count * self.dtype.itemsize
        if apart == 1:
            return string_at(address, length)
        content: bytes = bytes_at(address, length).view(self.dtype)[begin::apart].tobytes()
        return content


def form_of(tensor: torch.Tensor) -> Form | None:
    """The form of a tensor; None if it is not compared."""
    kind, count = _KINDS.get(tensor.dtype), tensor.numel()
    if kind is None or not count or type(tensor) not in _CLASSES or tensor.layout is not torch.strided:
        return None
    precision, dtype = kind
    if tensor.is_contiguous():
        # A lazily negated view is contiguous only if it has one element.
        return None if count == 1 and tensor.is_neg() else Form(precision, dtype, count)
    return Form(precision, dtype, count, tensor.stride()) if _is_dense(tensor) and not tensor.is_neg() else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no elements share memory, and there are no gaps between them."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


class TensorLook(msgspec.Struct, gc=False):
    """One look of a step.

    Attributes:
        label, number: the name of the parameter, and its number in the optimizer.
        is_parameter: whether it is at the parameter; otherwise at its gradient.
        form: of the tensor.
    """

    label: str
    number: int
    is_parameter: bool
    form: Form


class StepPlace(NamedTuple):
    """What the places of a step's looks depend on.

    Attributes:
        owner: the number of the optimizer.
        step: how many steps it has made.
        times: how often the step has looked before.
    """

    owner: int
    step: int
    times: int

    def part(self, number: int, count: int) -> tuple[int, int]:
        """The first element, and the distance of elements, that the look at a tensor of ``count`` elements reads."""
        return (0, 1) if count < 2 * ELEMENTS else part_of(count, place_of(self.step, number))

    def looks(self, at: Sequence[TensorLook], values: Sequence[Array]) -> Looks:
        """The looks, of the elements that they have read."""
        parts = []
        for look, each in zip(at, values, strict=True):
            form, number = look.form, look.number
            begin, _ = self.part(number, form.count)
            tag = tag_of(form.precision, look.is_parameter, *self, number, form.count, begin, *form.strides)
            parts.append(Part(tag, look.label, each, place_of(self.step, number)))
        return looks_at(parts)


Chosen = tuple[torch.Tensor, TensorLook]
"""A tensor, and the look at it, which does not keep the tensor."""


class StepSampler:
    """Chooses what is looked at in each step. The choice follows from the optimizer's steps and from which gradients were
    reduced, which all ranks know.

    Every parameter has its turn once, then all have it again.

    Attributes:
        number: of the optimizer.
    """

    def __init__(self) -> None:
        self.number = 0
        self._waiting = 0  # the set of slots that have not had their turn
        self._slots: list[ParameterState] = []
        self._step, self._times = -1, 0

    def begin(self, name: str) -> None:
        """Begin to count from 0, as all ranks do.

        Args:
            name: of the optimizer.
        """
        self.number = number_of(name)
        self._waiting = 0
        self._step = -1

    def renumbered(self, slots: Sequence[ParameterState]) -> None:
        """Take over the slots of the optimizer, of which some are new or gone."""
        self._slots = list(slots)
        self._waiting = 0

    def take(self, samples: Samples, owner: Owner, step: int, reduced: int, parameters: bool) -> None:
        """Look at gradients and parameters that the optimizer is about to step with, in a step that looks
        (:func:`~horovod.comparison.looks.looks_in`).

        Args:
            step: how many steps it has made.
            reduced: the set of slots whose gradients were reduced for this step.
            parameters: whether parameters must be the same on all ranks.
        """
        self._times = self._times + 1 if step == self._step else 0  # a closure may be called several times in a step
        self._step = step
        chosen = self._chosen(step, reduced, parameters)
        if not chosen:
            return
        place, first = StepPlace(owner.number, step, self._times), chosen[0][0]
        if first.is_cpu:
            seen = seen_in_host_memory(chosen, place)
            samples.offer(StepLooks(owner, step + 1, len(self._slots), lambda: seen))
            return
        copies = DeviceCopies.of([each for each in chosen if each[0].device == first.device], place)
        if copies is not None:
            samples.offer(StepLooks(owner, step + 1, len(self._slots), copies.read, late=True))

    def _chosen(self, step: int, reduced: int, parameters: bool) -> list[Chosen]:
        count = tensors_in_step(step, self.number, len(self._slots))
        chosen: list[Chosen] = []
        first = place_of(step, 0)
        due, taken = self._waiting & reduced, 0
        for turn in range(first, first + min(count, reduced.bit_count())):
            if not due:  # all have had their turn
                self._waiting |= reduced
                due = reduced & ~taken
            bit = due & -due
            due ^= bit
            taken |= bit
            number = bit.bit_length()
            slot = self._slots[number - 1]
            parameter = slot.parameter
            if not parameter.requires_grad:
                continue
            if turn % count < GRADIENTS and (gradient := parameter.grad) is not None:
                form = form_of(gradient)
                if form is not None:
                    chosen.append((gradient, TensorLook(slot.name, number, False, form)))
            if parameters:
                form = form_of(parameter)
                if form is not None:
                    chosen.append((parameter, TensorLook(slot.name, number, True, form)))
        self._waiting &= ~taken
        return chosen


def seen_in_host_memory(chosen: Sequence[Chosen], place: StepPlace) -> Seen:
    """What is seen of tensors in host memory. Others are left out."""
    at: list[TensorLook] = []
    read: list[bytes] = []
    for tensor, look in chosen:
        if tensor.is_cpu:
            form = look.form
            read.append(form.read(tensor.data_ptr(), *place.part(look.number, form.count)))
            at.append(look)

    def looks() -> Looks:
        return place.looks(at, [np.frombuffer(each, look.form.dtype) for each, look in zip(read, at, strict=True)])

    return Seen(len(at), b"".join(read), looks)


class DeviceCopies:
    """Elements on their way from a device, in one tensor. The script does not wait for them."""

    def __init__(
        self, at: Sequence[TensorLook], place: StepPlace, lengths: Sequence[int], joined: torch.Tensor, arrived: Any
    ) -> None:
        self._at, self._place, self._lengths, self._joined, self._arrived = at, place, lengths, joined, arrived

    @classmethod
    def of(cls, chosen: Sequence[Chosen], place: StepPlace) -> DeviceCopies | None:
        """Begin to copy. None if a graph is being captured, or if the kind of device has no streams.

        Args:
            chosen: at least one tensor; all on one device.
        """
        device = chosen[0][0].device
        module: Any = getattr(torch, device.type, None)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is None or capturing():
            return None
        parts: list[torch.Tensor] = []
        with torch.no_grad():
            for tensor, look in chosen:
                begin, apart = place.part(look.number, look.form.count)
                length = -(-(look.form.count - begin) // apart)
                parts.append(tensor.as_strided((length,), (apart,), tensor.storage_offset() + begin))
            joined = torch.cat(parts)  # of their common type, which is exact
            target = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=device.type == "cuda")
            target.copy_(joined, non_blocking=True)
        at, lengths = [look for _, look in chosen], [len(each) for each in parts]
        return cls(at, place, lengths, target, module.current_stream(device).record_event())

    def read(self) -> Seen | None:
        if not self._arrived.query():
            return None
        return Seen(len(self._at), self._joined.view(torch.uint8).numpy().tobytes(), self._looks)

    def _looks(self) -> Looks:
        values = self._joined.double().numpy()
        ends = accumulate(self._lengths)
        return self._place.looks(
            self._at, [values[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]
        )
