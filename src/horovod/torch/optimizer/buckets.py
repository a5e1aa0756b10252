"""A bucket of an optimizer's parameters, which travel as one request, and its way through a step.

What fills buckets is :mod:`horovod.torch.optimizer.readiness`; what cuts them, :mod:`horovod.torch.optimizer.bucket_cutting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors
from horovod.core.coordination.messages import HOST
from horovod.core.submission.collectives import allreduce_request, submit
from horovod.core.submission.handle import Handle
from horovod.core.submission.prepared import Prepared
from horovod.torch.compression.bucket_compression import Reduction
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.tensors import check_sign, flat_array, layout_of
from horovod.torch.optimizer.gradient_hooks import GradientHook


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        name: of the parameter.
        bucket: None until the first step of a generation cuts the buckets.
        hook: by which the optimizer hears of the parameter's gradients, on a rank that takes part.
        passes: backward passes that are still to come before its gradient travels.
        ready: it has had them all.
        version: PyTorch's count of changes to the gradient (``_version``), as it was after the last change by backward, by the
            reduction or by the step. None: there was no gradient.
        sparse: its gradients were sparse the last time there were any.
        memory: of the compressor for this parameter, from step to step.
    """

    __slots__ = ("bucket", "hook", "memory", "name", "parameter", "passes", "ready", "sparse", "version")

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.bucket: Bucket | None = None
        self.hook: GradientHook | None = None
        self.passes = 1
        self.ready = False
        self.version: int | None = None
        self.sparse = False
        self.memory: dict[str, Any] = {}

    def travels(self, gradient: torch.Tensor) -> tuple[Slot, torch.Tensor]:
        """For :attr:`Bucket.sent`: from now on only a backward pass may change the gradient."""
        self.version = gradient._version
        return self, gradient


class Bucket:
    """Parameters that travel together.

    Attributes:
        waiting: slots whose gradient is not ready yet.
        handle: of what is under way, or None.
        reduced: what this step sends has been reduced.
        sent: the gradients that are under way, with their slots.
        after: what is to be done when it is through.
    """

    __slots__ = (
        "_prepared",
        "_single",
        "after",
        "handle",
        "name",
        "reduced",
        "sent",
        "slots",
        "waiting",
    )

    def __init__(self, name: str, slots: Sequence[Slot], passes: int) -> None:
        self.name = name
        self.slots = list(slots)
        self.waiting = len(self.slots)
        self.handle: Handle | Reduction | None = None
        self.reduced = False
        self.sent: list[tuple[Slot, torch.Tensor]] = []
        self.after: list[Callable[[], None]] = []
        self._prepared: Prepared | None = None
        self._single: list[int] = []
        for slot in self.slots:
            slot.bucket = self
        self.reset(passes)

    @property
    def open(self) -> bool:
        """Whether it is still to be sent in this step."""
        return self.handle is None and not self.reduced

    def reset(self, passes: int) -> None:
        """Wait for ``passes`` backward passes anew."""
        self.handle = None
        self.sent.clear()
        self.after.clear()
        self.waiting = len(self.slots)
        for slot in self.slots:
            slot.passes = passes
            slot.ready = False

    def wait(self, complaint: str) -> None:
        """Wait until it is reduced, if it could be sent.

        Raises:
            HorovodInternalError: that failed.
            AssertionError: a gradient was written to, or replaced, since it was sent, other than by a backward pass. That it
                was set to None is no error: the parameter is not to move. The reduction itself writes without PyTorch's
                counting it.
        """
        if self.handle is None:
            return
        self.handle.wait()
        for slot, gradient in self.sent:
            present = slot.parameter.grad
            if gradient._version != slot.version or (present is not gradient and present is not None):
                raise AssertionError(complaint.format(name=slot.name))

    def dissolve(self) -> None:
        """Let go of the parameters at once; slots and bucket hold each other."""
        for slot in self.slots:
            slot.bucket = None
        self.slots.clear()
        self.sent.clear()
        self._prepared = None

    def submit(
        self,
        slots: Sequence[Slot],
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        process_set_id: int | None,
        line: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        """Start to reduce ``tensors``, which belong to ``slots`` of this bucket, in place. The one way to the core.

        Args:
            tensors: contiguous, on one device. The request of the last step serves again while their types and shapes stay.
            line: of the user's code, for errors.
        """
        memory = memory_of(tensors)
        key: list[object] = [
            memory.device,
            *slots,
            *map(type, tensors),
            *[tensor.dtype for tensor in tensors],
            *[tensor.shape for tensor in tensors],
        ]
        prepared = self._prepared
        if prepared is not None and prepared.key != key:
            prepared = None
        if prepared is not None and memory.device == HOST:  # the tensors were checked the last time
            vectors = self._vectors(tensors, prepared)
            return prepared.submit(process_set_id, vectors, vectors, owner=tensors)
        if memory.device != HOST:  # PyTorch's own copies write the result; those to an alias are not counted as changes
            tensors = [tensor.data for tensor in tensors]
        sources, targets = memory.reduce(tensors, tensors)
        if prepared is None:
            specs = [
                (f"allreduce.{slot.name}", each.data_type, each.shape)
                for slot, each in zip(slots, sources, strict=True)
            ]
            request = allreduce_request(self.name, specs, op, prescale, postscale, line, device=memory.device)
            layout = layout_of(tensors) if memory.device == HOST and tensors else None
            prepared = self._prepared = Prepared(key, request, layout)
            self._single = [index for index, tensor in enumerate(tensors) if tensor.numel() == 1]
        handle = submit(process_set_id, prepared.request, sources, targets)
        self.after.insert(0, memory.arrive)
        return handle

    def _vectors(self, tensors: Sequence[torch.Tensor], prepared: Prepared) -> Vectors:
        """Tensors that agree with those of the last step in all but their place."""
        if prepared.layout is None:
            return [flat_array(tensor) for tensor in tensors]
        for index in self._single:
            check_sign(tensors[index])
        return prepared.at([tensor.data_ptr() for tensor in tensors])
