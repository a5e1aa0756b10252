"""Sends a bucket's gradients: directly from host memory if possible, otherwise compressed, made dense, or gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeGuard, cast
from weakref import ref

import torch

from horovod._bindings.compression import is_of_blocks
from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.compression.bucket_compression import BucketCompressor, BucketReduction
from horovod.torch.ops.allgather import grouped_allgather_async
from horovod.torch.ops.allreduce import grouped_allreduce_alike
from horovod.torch.ops.handles import synchronize
from horovod.torch.ops.sparse_allreduce import sparse_allreduce_async
from horovod.torch.optimizer.buckets import Bucket, ParameterState
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.storage_references import are_alone, is_alone


class PendingHandle:
    """A running collective of a compressor."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> list[torch.Tensor]:
        """Wait, and return the results. Raises HorovodInternalError if the collective failed."""
        return list(synchronize(self._handle))


class BucketCollectives:
    """Implements :class:`~horovod.torch.compression.bucket_compression.Collectives` for one bucket.

    The names of collectives contain that of the bucket.
    """

    def __init__(self, bucket: str, op: ReduceOp, process_set: ProcessSet) -> None:
        self._bucket = bucket
        self._op = op
        self._process_set = process_set
        self.size = process_set.size() or 1
        self.average = op == ReduceOp.AVERAGE

    def allreduce(self, tensors: Sequence[torch.Tensor], label: str) -> PendingHandle:
        name = f"{self._bucket}.{label}"
        reduction = ReductionArguments(self._op, process_set=self._process_set)  # HOROVOD_COMPRESSION is for gradients
        return PendingHandle(grouped_allreduce_alike(tensors, (), name, reduction))

    def allgather(self, tensors: Sequence[torch.Tensor], label: str) -> PendingHandle:
        return PendingHandle(grouped_allgather_async(tensors, f"{self._bucket}.{label}", self._process_set))


_GRADIENT = attrgetter("parameter.grad")
_LAYOUT, _REQUIRES_GRAD, _IS_CONTIGUOUS = (
    attrgetter("layout"),
    attrgetter("requires_grad"),
    methodcaller("is_contiguous"),
)


class BucketSender:
    """Sends the buckets of one optimizer. It does not send a bucket with a parameter that has no gradient.

    Args:
        settings: the settings of the optimizer.

    Attributes:
        sent: the buckets that are being reduced, in the order in which they were sent.
        knows_sparse: whether a gradient was sparse on some rank.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self.sent: list[Bucket] = []
        self.knows_sparse = False
        compression = settings.compression
        self._settings = settings
        self._process_set: ProcessSet = settings.process_set
        self._whole = compression if isinstance(compression, BucketCompressor) else None
        self._single: type[Compressor] = NoneCompressor if isinstance(compression, BucketCompressor) else compression
        self._as_they_are = compression is NoneCompressor or is_of_blocks(compression)
        self._exact = compression is NoneCompressor and not settings.form

    @property
    def exact(self) -> bool:
        """Whether gradients are sent without compression. Only then may a gradient be averaged again with an older part that is
        the same on all ranks."""
        return self._exact

    def send(self, bucket: Bucket, awaited: bool = False) -> None:
        """Start to reduce a bucket that is not being reduced. Sets its ``handle`` and ``sent``.

        Args:
            awaited: whether this thread will wait for the reduction soon, at the end of backward. Then the worker thread is not
                woken.
        """
        bucket.after.clear()
        gradients = [*map(_GRADIENT, bucket.slots)]
        if self._as_they_are and bucket.matches(bucket.slots, gradients) and _are_plain(gradients):
            bucket.mark_sent([*gradients])
            bucket.handle = bucket.submit_again(gradients, self._process_set.process_set_id, awaited)
        else:
            self._send_converted(bucket)
        if bucket.handle is not None:
            self.sent.append(bucket)

    def note_sparse(self, slots: Iterable[ParameterState], sparse: int = 0) -> None:
        """Note that gradients are sparse on some rank: of these slots those in the set ``sparse``."""
        self.knows_sparse = True
        for slot in slots:
            slot.sparse = bool(slot.bit & sparse)

    def wait(self, complaint: str, excused: Callable[[ParameterState, torch.Tensor], bool]) -> BaseException | None:
        """Wait until all buckets that were sent are reduced, and complete their gradients. Returns the first error.

        Args:
            complaint, excused: as of :meth:`Bucket.wait`.
        """
        error: BaseException | None = None
        if self._whole is not None:
            try:
                self._advance()
            except BaseException as failure:
                error = failure
        for bucket in self.sent:
            try:
                bucket.wait(complaint, excused)
                for complete in bucket.after:
                    complete()
            except BaseException as failure:
                error = error or failure
        return error

    def _advance(self) -> None:
        """Continue the collectives of compressors until all have ended."""
        under_way = [bucket.handle for bucket in self.sent]
        while under_way:
            under_way = [each for each in under_way if isinstance(each, BucketReduction) and each.advance()]

    def reset(self) -> None:
        """Prepare the buckets that were sent for the next backward passes. No reduction may be running."""
        for bucket in self.sent:
            bucket.reset()
        self.sent.clear()

    def _send_converted(self, bucket: Bucket) -> None:
        """Send a bucket for the first time, or one with gradients that are sparse, complex, compressed or part of a graph."""
        gradients = [gradient for slot in bucket.slots if (gradient := _own(slot)) is not None]
        if len(gradients) != len(bucket.slots):
            return
        bucket.mark_sent([*gradients])
        tensors: list[torch.Tensor] = []
        slots: list[ParameterState] = []
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            if gradient.layout is not torch.strided:
                if not self._settings.sparse_as_dense:
                    self._send_sparse(bucket, slot, gradient)
                    continue
                gradient = self._densified(bucket, slot, gradient)
            alone = is_alone(gradient)
            if gradient.dtype.is_complex:
                gradient = torch.view_as_real(gradient.detach())
            if not self._as_they_are or not gradient.is_contiguous():
                gradient = self._compressed(bucket, gradient, alone)
            elif not alone:
                own = gradient.detach().clone()
                bucket.after.insert(0, partial(_put_back, gradient, own))
                gradient = own
            tensors.append(gradient)
            slots.append(slot)
        settings = self._settings
        if self._whole is not None:
            # PyTorch does not count a write to an alias as a change of the gradient.
            aliases = {slot.name: tensor.data for slot, tensor in zip(slots, tensors, strict=True)}
            memory = {slot.name: slot.memory for slot in slots}
            collectives = BucketCollectives(bucket.name, settings.op, self._process_set)
            bucket.handle = BucketReduction(self._whole.reduce(aliases, memory, collectives))
            return
        reduction = ReductionArguments(settings.op, *settings.scales(), self._process_set, settings.chosen_form)
        bucket.handle = bucket.submit(slots, tensors, reduction, settings.line)

    def _compressed(self, bucket: Bucket, gradient: torch.Tensor, alone: bool) -> torch.Tensor:
        """The contiguous, compressed tensor to send for a gradient. It is decompressed after the reduction.

        Args:
            alone: whether nothing else uses the gradient's memory. If not, the tensor is a copy.
        """
        compressed, context = self._single.compress(gradient.detach())
        sent: torch.Tensor = compressed.contiguous()
        if not alone and sent.data_ptr() == gradient.data_ptr():
            sent = sent.clone()
        if sent is not gradient:
            bucket.after.insert(0, partial(self._restore, gradient, sent, context))
        return sent

    def _restore(self, gradient: torch.Tensor, received: torch.Tensor, context: Any) -> None:
        with torch.no_grad():
            _put_back(gradient, self._single.decompress(received, context))

    def _densified(self, bucket: Bucket, slot: ParameterState, gradient: torch.Tensor) -> torch.Tensor:
        """A dense copy to send for a sparse gradient. The result is made sparse again."""
        self.knows_sparse = slot.sparse = True
        dense = gradient.detach().to_dense()
        bucket.after.append(lambda: _replace(slot, dense.to_sparse(gradient.sparse_dim())))
        return dense

    def _send_sparse(self, bucket: Bucket, slot: ParameterState, gradient: torch.Tensor) -> None:
        self.knows_sparse = slot.sparse = True
        name = f"{bucket.name}.{slot.name}"
        result = sparse_allreduce_async(gradient.detach(), name, self._settings.op, self._process_set)
        bucket.after.append(lambda: _replace(slot, result()))


def is_sparse(slot: ParameterState) -> bool:
    """Whether the present gradient of a parameter is sparse."""
    gradient = slot.parameter.grad
    return gradient is not None and gradient.layout is not torch.strided


def zero_gradient(slot: ParameterState) -> torch.Tensor:
    """A gradient of zeros for a parameter, sparse or dense like its other gradients."""
    parameter = slot.parameter
    if not slot.sparse:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64),
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
        parameter.shape,
        device=parameter.device,
    )


def _own(slot: ParameterState) -> torch.Tensor | None:
    """The gradient of a parameter, made suitable for a reduction in place: not lazily conjugated, and not part of a graph."""
    gradient = slot.parameter.grad
    if gradient is None:
        return None
    if gradient.requires_grad:  # of a pass with create_graph=True: the graph may need the unchanged memory
        slot.parameter.grad = gradient = gradient.detach().clone()
    if gradient.dtype.is_complex and gradient.is_conj():
        slot.parameter.grad = gradient = gradient.resolve_conj()
    return gradient


def _put_back(gradient: torch.Tensor, reduced: torch.Tensor) -> None:
    """Copy the result of a copy to where the gradient is, at the end of the step, when backward reads no memory any more.

    PyTorch counts changes for all gradients in the same memory together. This is none of them: the slots expect their counts.
    """
    gradient.data.copy_(reduced)


def _replace(slot: ParameterState, gradient: torch.Tensor) -> None:
    if slot.parameter.grad is not None:  # the user may have removed it
        slot.parameter.grad = gradient
        slot.version = gradient._version
        slot.reduced = ref(gradient)


def _are_plain(gradients: Sequence[torch.Tensor | None]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether gradients, all on one device, are dense, contiguous, in host memory of their own and not part of a graph.

    Args:
        gradients: none of them is None; :meth:`Bucket.matches` has checked this.
    """
    first = gradients[0]
    return (
        first is not None
        and first.is_cpu
        and all(map(is_, map(_LAYOUT, gradients), repeat(torch.strided)))
        and all(map(_IS_CONTIGUOUS, gradients))
        and not any(map(_REQUIRES_GRAD, gradients))
        and are_alone(cast("Sequence[torch.Tensor]", gradients))
    )
