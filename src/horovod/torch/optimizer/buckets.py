"""A bucket: parameters of an optimizer whose gradients are sent in one request.

:mod:`horovod.torch.optimizer.bucket_cutting` decides which parameters share a bucket.
:mod:`horovod.torch.optimizer.gradient_passes` and the rounds decide when a bucket is sent; with Adasum,
:mod:`horovod.torch.optimizer.adasum_passes` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, eq, is_, methodcaller, or_
from typing import Any
from weakref import ref

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import can_compress
from horovod.comm.datatypes import Array
from horovod.comm.spans import Vectors
from horovod.core.negotiation.messages import HOST, Operation
from horovod.core.requests.handle import Handle
from horovod.core.submission.collectives import prepared_call, submit
from horovod.core.submission.prepared import Prepared
from horovod.torch.compression.bucket_compression import BucketReduction
from horovod.torch.device.memory import memory_of
from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.tensors import DATA_TYPES, check_sign, flat_array, layout_of

_DTYPE, _SHAPE, _ADDRESS = attrgetter("dtype"), attrgetter("shape"), methodcaller("data_ptr")


NO_GRADIENT = -1
"""The version of a gradient that does not exist."""
PARTS = 16
"""How many different parts of a bucket keep their requests. At this number, parts that are not being reduced are dropped."""


def _no_gradient() -> None:
    """A parameter's gradient before it is known."""


class ParameterState:
    """An optimizer's data for one parameter.

    Attributes:
        name: the parameter's name, for messages.
        bit: the slot's bit in sets of slots, which are integers. The same on all ranks.
        bucket: the bucket of its gradient. None until the first step of a generation cuts the buckets.
        hook: notifies the optimizer of new gradients. None on a rank that takes no part in the reduction.
        passes: with Adasum, how many backward passes of this step have added to the gradient.
        version: PyTorch's count of changes to the gradient (``_version``) when it was last sent, or when a backward pass last
            added to it and kept it on this rank.
        left: returns the gradient as a backward pass last kept it on this rank, or as the last step found it. None if it no
            longer exists.
        sparse: whether the gradient is sparse on some rank.
        aside: the older, already reduced part of the gradient, while a newer part is reduced separately.
        memory: a compressor's state for this parameter, kept from step to step.
        reduced: returns the gradient that was last reduced, or None if it no longer exists.
    """

    __slots__ = (
        "aside",
        "bit",
        "bucket",
        "hook",
        "left",
        "memory",
        "name",
        "parameter",
        "passes",
        "reduced",
        "sparse",
        "version",
    )

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.bit = 0
        self.bucket: Bucket | None = None
        self.hook: GradientHook | None = None
        self.passes = 0
        self.version = NO_GRADIENT
        self.left: Callable[[], torch.Tensor | None] = _no_gradient
        self.sparse = False
        self.aside: torch.Tensor | None = None
        self.memory: dict[str, Any] = {}
        self.reduced: Callable[[], torch.Tensor | None] = _no_gradient

    def note_left(self, gradient: torch.Tensor | None) -> None:
        """Remember which tensor the gradient is. Its address would not do, because a new tensor may have it."""
        self.left = _no_gradient if gradient is None else ref(gradient)

    def put_aside(self, gradient: torch.Tensor | None) -> None:
        """Keep the reduced gradient aside, with ``gradient`` in its place."""
        self.aside, self.parameter.grad = self.parameter.grad, gradient

    def put_back(self) -> None:
        """Restore the gradient that was put aside, if there is one, because what is newer is not reduced."""
        if self.aside is not None:
            self.parameter.grad, self.aside = self.aside, None

    def drop_aside(self) -> None:
        self.aside = None

    def add_aside(self) -> None:
        """Add the gradient that was put aside, if there is one, to what was reduced since."""
        old, new, self.aside = self.aside, self.parameter.grad, None
        if old is not None:
            with torch.no_grad():
                self.parameter.grad = old if new is None else old.add_(new)
            self.reduced, self.version = ref(old), old._version

    def __repr__(self) -> str:
        return f"ParameterState({self.name!r}, {self.parameter.dtype} {tuple(self.parameter.shape)})"


ROUNDED_OFF = "rounded off"
"""The key in a slot's memory of what the compression between hosts has rounded away on this rank: a float32 vector in host
memory, in the order of the gradient's elements."""


def errors_of(slots: Sequence[ParameterState], tensors: Sequence[torch.Tensor]) -> Errors:
    """The memory for error feedback of the tensors that are sent for these slots, kept from step to step."""
    found: list[Array | None] = []
    for slot, tensor in zip(slots, tensors, strict=True):
        length = tensor.numel()
        if not can_compress(DATA_TYPES[tensor.dtype], length):
            found.append(None)
            continue
        kept = slot.memory.get(ROUNDED_OFF)
        if kept is None or kept.numel() != length:
            kept = torch.zeros(length, dtype=torch.float32)
        slot.memory[ROUNDED_OFF] = kept = kept.cpu()
        found.append(kept.numpy())
    return found


class Bucket:
    """Parameters whose gradients are sent in one request.

    Attributes:
        name: the name of its request, the same on all ranks.
        slots: the slots of its parameters.
        mask: the set of its slots, as bits.
        waiting: the number of slots whose gradient is not ready.
        handle: the handle of the running reduction, or None.
        sent: the gradients that are being reduced, one for each slot. None for a parameter without a gradient.
        after: functions to call when the reduction is complete.
        reached: for each pass that has reached only a part of the slots, since a pass last reached all of them, that part.
            Passes that have reached none are left out.
    """

    __slots__ = (
        "_errors",
        "_kept",
        "_parts",
        "_prepared",
        "_single",
        "after",
        "handle",
        "mask",
        "name",
        "reached",
        "sent",
        "slots",
        "waiting",
    )

    def __init__(self, name: str, slots: Sequence[ParameterState]) -> None:
        self.name = name
        self.slots = list(slots)
        self.waiting = len(self.slots)
        self.handle: Handle | BucketReduction | None = None
        self.sent: list[torch.Tensor | None] = []
        self.after: list[Callable[[], None]] = []
        self.reached: list[int] = []
        self._prepared: Prepared | None = None
        self._single: list[int] = []
        self._kept: list[torch.Tensor | None] = []  # of the slots, when ``_errors`` was made
        self._errors: Errors = ()
        self._parts: dict[int, Bucket] = {}
        self.renumber()

    def __repr__(self) -> str:
        return f"Bucket({self.name!r}, {len(self.slots)} gradients, {self.waiting} not ready)"

    def renumber(self) -> None:
        """Update ``mask`` after the bits of slots have changed. No part of the bucket may be being reduced."""
        self.mask = reduce(or_, (slot.bit for slot in self.slots), 0)
        self.reached.clear()
        self._parts.clear()

    def part(self, wanted: int) -> Bucket:
        """A bucket of only the slots in the set ``wanted``. The part keeps its request, so later calls are cheap."""
        found = self._parts.get(wanted)
        if found is None:
            slots = [slot for slot in self.slots if slot.bit & wanted]
            bits = "".join("01"[bool(slot.bit & wanted)] for slot in self.slots)
            label = hashlib.blake2b(bits.encode(), digest_size=8).hexdigest()
            if len(self._parts) >= PARTS:
                self._parts = {mask: part for mask, part in self._parts.items() if part.handle is not None}
            found = self._parts[wanted] = Bucket(f"{self.name}.part.{label}", slots)
        return found

    def reset(self) -> None:
        """Prepare for the next backward passes. No reduction may be running."""
        self.handle = None
        self.sent.clear()
        self.after.clear()
        self.waiting = len(self.slots)

    def mark_sent(self, gradients: list[torch.Tensor | None]) -> None:
        """Remember the gradients that are about to be sent. From now on the script must not change them."""
        self.sent = gradients
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient is not None:
                slot.version = gradient._version

    def wait(
        self, complaint: str, excused: Callable[[ParameterState, torch.Tensor], bool] = lambda slot, gradient: False
    ) -> None:
        """Wait until the bucket is reduced. Returns at once if it was not sent.

        Args:
            complaint: the text of the AssertionError, with ``{name!r}`` for the parameter.
            excused: whether a gradient may have changed since it was sent.

        Raises:
            HorovodInternalError: the reduction failed.
            AssertionError: the script has changed or replaced a gradient since it was sent. The script may set a gradient to
                None; then the step does not change the parameter. PyTorch does not count the writes of the reduction.
        """
        if self.handle is None:
            return
        self.handle.wait()
        for slot, gradient in zip(self.slots, self.sent, strict=True):
            if gradient is None:
                continue
            present = slot.parameter.grad
            changed = gradient._version != slot.version and not excused(slot, gradient)
            if changed or (present is not gradient and present is not None):
                raise AssertionError(complaint.format(name=slot.name))
            slot.reduced = ref(gradient)

    def dissolve(self) -> None:
        """Release the parameters at once, without the garbage collector: slots and bucket refer to each other."""
        for slot in self.slots:
            if slot.bucket is self:
                slot.bucket = None
        for part in self._parts.values():
            part.dissolve()
        self._parts.clear()
        self.slots.clear()
        self.sent.clear()
        self._prepared, self._errors = None, ()

    def submit(
        self,
        slots: Sequence[ParameterState],
        tensors: Sequence[torch.Tensor],
        reduction: ReductionArguments,
        line: str,
    ) -> Handle:
        """Start to reduce ``tensors``, which belong to ``slots`` of this bucket, in place.

        Args:
            tensors: contiguous, on one device.
            line: the line of the user's code, for errors.
        """
        memory = memory_of(tensors, reduction)
        on_host = memory.device == HOST
        if on_host and self.matches(slots, tensors):
            return self.submit_again(tensors, reduction.process_set.process_set_id)
        if not on_host:  # PyTorch does not count a copy of the result into an alias
            tensors = [tensor.data for tensor in tensors]
        sources, targets = memory.reduce(tensors, tensors)
        call = prepared_call(
            Operation.ALLREDUCE,
            "",
            self.name,
            sources,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            device=memory.device,
            line=line,
            labels=[f"allreduce.{slot.name}" for slot in slots],
            compression=reduction.form,
        )
        if on_host:
            key = (
                list(slots),
                [*map(type, tensors)],
                [tensor.dtype for tensor in tensors],
                [tensor.shape for tensor in tensors],
            )
            self._prepared = Prepared(key, call.request, layout_of(tensors) if tensors else None)
            self._single = [index for index, tensor in enumerate(tensors) if tensor.numel() == 1]
        members = reduction.process_set.process_set_id
        errors = errors_of(slots, tensors) if call.compresses(members) else ()
        self._errors = ()
        handle = submit(members, call.request, sources, targets, errors=errors)
        self.after.insert(0, partial(memory.arrive, handle))
        return handle

    def matches(self, slots: Sequence[ParameterState], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether the last tensors in host memory had these slots, classes, types and shapes. False if one of ``tensors`` is
        None."""
        if self._prepared is None:
            return False
        known_slots, classes, dtypes, shapes = self._prepared.key
        # The shapes are compared one by one: a new list of them, which are tuples, could make the garbage collector run.
        return (
            known_slots == slots
            and classes == [*map(type, tensors)]
            and all(map(is_, dtypes, map(_DTYPE, tensors)))
            and all(map(eq, shapes, map(_SHAPE, tensors)))
        )

    def submit_again(
        self, tensors: Sequence[torch.Tensor], process_set_id: int | None, awaited: bool = False
    ) -> Handle:
        """Submit the last request with tensors in host memory that it :meth:`matches`. They must be contiguous.

        Args:
            awaited: whether this thread will wait for the handle soon.
        """
        prepared = self._prepared
        assert prepared is not None
        vectors: Vectors
        if prepared.layout is None:
            vectors = [flat_array(tensor) for tensor in tensors]
        else:
            for index in self._single:
                check_sign(tensors[index])
            vectors = prepared.at([*map(_ADDRESS, tensors)])
        errors = self._errors_again(tensors) if prepared.compresses(process_set_id) else ()
        return prepared.submit(process_set_id, vectors, vectors, awaited, owner=tensors, errors=errors)

    def _errors_again(self, tensors: Sequence[torch.Tensor]) -> Errors:
        """As :func:`errors_of`; what it returned last, as long as the slots keep the same memory."""
        kept = [slot.memory.get(ROUNDED_OFF) for slot in self.slots]
        if not self._errors or not all(map(is_, kept, self._kept)):
            self._errors = errors_of(self.slots, tensors)
            self._kept = [slot.memory.get(ROUNDED_OFF) for slot in self.slots]
        return self._errors
