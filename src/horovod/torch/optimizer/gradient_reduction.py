"""Reduces an optimizer's gradients, in place, in the memory where backward left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch

from horovod.common.reductions import Reducing
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.negotiation.messages import HOST
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.compression.bucket_compression import BucketCompressor, Reduction
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.ops.sparse_allreduce import sparse_allreduce_async
from horovod.torch.optimizer.bucket_collectives import BucketCollectives
from horovod.torch.optimizer.buckets import Bucket, Slot
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.readiness import Phase, Readiness
from horovod.torch.optimizer.settings import Settings

_SKIPPED = (
    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients are being reduced; "
    "call optimizer.synchronize() before the block"
)
_NOT_WAITED = (
    "backward() waits for the reduction if it has reached every parameter whose optimizer is new or whose zero_grad() was "
    "called. Here it has not: this rank did not use a parameter, or it belongs to another optimizer. Call "
    "optimizer.synchronize() after backward()"
)
_CHANGED = (
    "The gradient of {name!r} was changed before its reduction was complete. "
    f"{_NOT_WAITED} and before changing gradients."
)
_NOT_REDUCED = (
    f"A gradient scaler was about to step with gradients that are not reduced. {_NOT_WAITED} and before scaler.unscale_() "
    "or scaler.step()."
)


class GradientReduction(Readiness):
    """The distributed part of an optimizer that steps with reduced gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        compression = settings.compression
        self._whole = compression if isinstance(compression, BucketCompressor) else None
        self._single: type[Compressor] = NoneCompressor if isinstance(compression, BucketCompressor) else compression
        self._uncompressed = compression is NoneCompressor
        self._process_set: ProcessSet = settings.process_set
        self._skip = False
        super().__init__(optimizer, settings, identity)

    def synchronize(self) -> None:
        """Reduce all gradients, and wait for the result. ``optimizer.synchronize()`` calls it.

        Raises:
            HorovodInternalError: the reduction failed.
            AssertionError: inside ``no_sync()``, or a gradient was changed while it was being reduced.
        """
        self._reduce("synchronize()")
        self.phase = Phase.SYNCHRONIZED

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """A block in which ``step()`` does not reduce the gradients."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def before_step(self) -> bool:
        """Reduce the gradients, unless that was done. Called before every step of the wrapped optimizer.

        Returns:
            Whether the script has called ``synchronize()`` before, outside of ``skip_synchronize()``.

        Raises:
            AssertionError: inside ``skip_synchronize()`` while gradients are being reduced.
        """
        if not self._skip:
            self._reduce("step()", self._changed_since_backward())
        elif self.under_way:
            raise AssertionError(_SKIPPED)
        return self.phase is Phase.SYNCHRONIZED and not self._skip

    def before_scaler_steps(self) -> None:
        if self._skip and self.under_way:
            raise AssertionError(_SKIPPED)
        self._begin_if_thrown_away()
        if not self._skip and not self.reduced and self.communicates():
            raise AssertionError(_NOT_REDUCED)

    def reducing(self, closure: Callable[[], Any], agree: bool) -> Callable[[], Any]:
        """A closure that calls ``closure`` and then reduces the gradients; the loss too, if ``agree``."""
        if self.under_way:
            self._reduce("step()")

        def reducing_closure() -> Any:
            if self.reduced:
                self.end_step()
            with torch.enable_grad():
                loss = closure()
            self._reduce("step()", self._changed_since_backward())
            self.end_step()
            return self._agreed(loss) if agree and self.buckets else loss

        return reducing_closure

    def end_backward(self) -> None:
        if self.phase is Phase.FILLING and self.under_way:
            self._finish(None)

    def abandon(self) -> None:
        if self.under_way:
            try:
                self._finish(self.send_all())  # also what this rank has not sent, for others may have
            except Exception:  # for example that the job has failed, which is why a state is loaded
                pass
        self.forget()

    # The step

    def _reduce(self, what: str, error: BaseException | None = None) -> None:
        """Send the buckets that are not sent, and wait until every gradient is reduced.

        If backward has reduced all gradients, only parameters that were added since then are left.

        Args:
            what: the method that the script has called.
            error: an error that is known already. It is raised after the reduction, because other ranks wait for this one.
        """
        self.check_not_paused(what)
        self._begin_if_thrown_away()
        failure = self.send_all()
        if error or failure or not self.reduced or self.under_way:
            self._finish(error or failure)

    def _begin_if_thrown_away(self) -> None:
        """After reduced gradients were removed without a step, a step begins even if backward reaches nothing on this rank."""
        if self.reduced and self.buckets and all(slot.parameter.grad is None for slot in self.slots.values()):
            self.begin()

    def _finish(self, error: BaseException | None) -> None:
        """Wait for all buckets that were sent. Raises ``error``, or the first error of a bucket."""
        if self._whole is not None:
            under_way = [bucket.handle for bucket in self.buckets]
            while under_way:
                under_way = [each for each in under_way if isinstance(each, Reduction) and each.advance()]
        for bucket in self.buckets:
            try:
                bucket.wait(_CHANGED)
                for finish in bucket.after:
                    finish()
            except BaseException as failure:
                error = error or failure
        if error is not None:
            self.forget()
            raise error
        self.end_reduction()

    def _changed_since_backward(self) -> BaseException | None:
        """The error if the script has changed a gradient after backward that is not sent yet. None otherwise."""
        if self.phase is Phase.FILLING:
            for bucket in self.buckets:
                for slot in bucket.slots if bucket.open else ():
                    gradient = slot.parameter.grad
                    if slot.version is not None and gradient is not None and gradient._version != slot.version:
                        return AssertionError(_CHANGED.format(name=slot.name))
        return None

    # One bucket

    def send(self, bucket: Bucket, awaited: bool = False) -> None:
        bucket.after.clear()
        gradients = [slot.parameter.grad for slot in bucket.slots]
        if self._uncompressed and bucket.matches(HOST, bucket.slots, gradients) and _are_plain(gradients):
            bucket.mark_sent([*gradients])
            bucket.handle = bucket.submit_again(gradients, self._process_set.process_set_id, awaited)
        else:
            self._send_converted(bucket)

    def _send_converted(self, bucket: Bucket) -> None:
        """Send a bucket for the first time, or one with gradients that are missing, sparse, complex or compressed."""
        gradients = [self._present(slot) for slot in bucket.slots]
        bucket.mark_sent([*gradients])
        tensors: list[torch.Tensor] = []
        slots: list[Slot] = []
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            if gradient.layout is not torch.strided:
                if not self.settings.sparse_as_dense:
                    self._send_sparse(bucket, slot, gradient)
                    continue
                gradient = self._densified(bucket, slot, gradient)
            if gradient.dtype.is_complex:
                gradient = torch.view_as_real(gradient.detach())
            if self._single is not NoneCompressor or not gradient.is_contiguous():
                gradient = self._compressed(bucket, slot, gradient)
            tensors.append(gradient)
            slots.append(slot)
        settings = self.settings
        if self._whole is not None:
            # PyTorch does not count a write to an alias as a change of the gradient
            aliases = {slot.name: tensor.data for slot, tensor in zip(slots, tensors, strict=True)}
            memory = {slot.name: slot.memory for slot in slots}
            collectives = BucketCollectives(bucket.name, settings.op, self._process_set)
            bucket.handle = Reduction(self._whole.reduce(aliases, memory, collectives))
            return
        how = Reducing(settings.op, *settings.scales(), self._process_set)
        bucket.handle = bucket.submit(slots, tensors, how, settings.line)

    def _present(self, slot: Slot) -> torch.Tensor:
        """The gradient of a parameter, without lazy conjugation; zeros for a parameter without one."""
        gradient = slot.parameter.grad
        if gradient is None:
            return self._nothing(slot)
        if gradient.dtype.is_complex and gradient.is_conj():
            slot.parameter.grad = gradient = gradient.resolve_conj()
        return gradient

    def _nothing(self, slot: Slot) -> torch.Tensor:
        """Zeros to send for a parameter without a gradient. They become its gradient.

        A frozen parameter, or one whose gradient the script has removed after backward, still gets no gradient.
        """
        parameter = slot.parameter
        gradient: torch.Tensor
        if slot.sparse:
            gradient = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
                parameter.shape,
                device=parameter.device,
            )
        else:
            gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        removed = self.phase is Phase.FILLING and slot.version is not None
        if parameter.requires_grad and not removed:
            parameter.grad = gradient
        return gradient

    def _compressed(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """The contiguous, compressed tensor to send for a gradient. It is decompressed after the reduction."""
        compressed, context = self._single.compress(gradient.detach())
        sent: torch.Tensor = compressed.contiguous()
        if sent is not gradient:
            bucket.after.insert(0, partial(self._restore, slot, gradient, sent, context))
        return sent

    def _restore(self, slot: Slot, gradient: torch.Tensor, received: torch.Tensor, context: Any) -> None:
        with torch.no_grad():
            gradient.copy_(self._single.decompress(received, context))
        slot.version = gradient._version

    def _densified(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """A dense copy to send for a sparse gradient. The result is made sparse again."""
        slot.sparse = True
        dense = gradient.detach().to_dense()

        def finish() -> None:
            self._replace(slot, dense.to_sparse(gradient.sparse_dim()))

        bucket.after.append(finish)
        return dense

    def _send_sparse(self, bucket: Bucket, slot: Slot, gradient: torch.Tensor) -> None:
        slot.sparse = True
        settings = self.settings
        result = sparse_allreduce_async(gradient.detach(), f"{bucket.name}.{slot.name}", settings.op, self._process_set)
        bucket.after.append(lambda: self._replace(slot, result()))

    def _replace(self, slot: Slot, gradient: torch.Tensor) -> None:
        if slot.parameter.grad is not None:  # the user may have removed it
            slot.parameter.grad = gradient
            slot.version = gradient._version

    def _agreed(self, loss: Any) -> Any:
        """The loss, reduced over the ranks like the gradients, so that the closure's caller decides the same on all ranks."""
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        allreduce_(common, name=f"{self.name}.loss", op=self.settings.op, process_set=self._process_set)
        return common.to(loss) if isinstance(loss, torch.Tensor) else common.item()


def _are_plain(gradients: Sequence[torch.Tensor | None]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether gradients, all on one device, are dense and contiguous in host memory."""
    strided = torch.strided
    for gradient in gradients:
        if gradient is None or gradient.layout is not strided or not gradient.is_contiguous():
            return False
    return gradients[0] is not None and gradients[0].is_cpu
