"""Reduces an optimizer's gradients, in place, in the memory where backward left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from horovod.core.process_set import ProcessSet
from horovod.torch.allreduce import allreduce_, sparse_allreduce_async
from horovod.torch.bucket_collectives import BucketCollectives
from horovod.torch.bucket_compression import BucketCompressor, Reduction
from horovod.torch.buckets import Bucket, Slot
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.optimizer_arguments import Settings
from horovod.torch.readiness import Readiness

_SKIPPED = (
    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients are being reduced; "
    "call optimizer.synchronize() before the block"
)


class GradientReduction(Readiness):
    """The distributed part of an optimizer that steps with reduced gradients.

    Attributes:
        synchronized: the gradients are reduced, and have not been used for a step since.
        asked_for: by the user, not on behalf of a gradient scaler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        compression = settings.compression
        self._whole = compression if isinstance(compression, BucketCompressor) else None
        self._single: type[Compressor] = NoneCompressor if isinstance(compression, BucketCompressor) else compression
        self._process_set: ProcessSet = settings.process_set
        self._skip = False
        self.synchronized = False
        self.asked_for = False
        super().__init__(optimizer, settings)

    # What the optimizer asks for

    def synchronize(self) -> None:
        """Send what is not under way yet, and wait until every gradient is reduced.

        Raises:
            HorovodInternalError: the reduction failed.
            AssertionError: inside ``no_sync()``.
        """
        self.check_not_paused("synchronize() or step()")
        error = self.send_all()
        if self._whole is not None:
            under_way = [bucket.handle for bucket in self.buckets]
            while under_way:
                under_way = [each for each in under_way if isinstance(each, Reduction) and each.advance()]
        for bucket in self.buckets:
            if bucket.handle is None:  # could not be sent
                continue
            try:
                bucket.handle.wait()
                for finish in bucket.after:
                    finish()
            except BaseException as failure:
                error = error or failure
        self.end()
        if error is not None:
            raise error
        self.synchronized = True

    def synchronize_for_user(self) -> None:
        """``synchronize()``. After a gradient scaler has asked for it, it does not reduce a second time."""
        if not self._up_to_date or self.asked_for:
            self.synchronize()
        self.asked_for = True

    def before_unscaling(self) -> None:
        if self._skip:
            self._check_still()
        elif not self._up_to_date:
            self.synchronize()
            self.asked_for = False

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """A block in which steps take the gradients as they are."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def before_step(self) -> bool:
        """Reduce the gradients unless that was done. Returns whether the user asked for it and should have said so.

        Raises:
            AssertionError: not to be reduced, but they are on their way.
        """
        up_to_date = self._up_to_date
        if self._skip:
            self._check_still()
        elif not up_to_date:
            self.synchronize()
        self.synchronized = False
        return up_to_date and self.asked_for and not self._skip

    def reduced(self, closure: Callable[[], Any], agree: bool) -> Callable[[], Any]:
        """``closure``, with its gradients reduced after each call, and if the ranks are to agree also its loss."""
        if self.under_way:
            self.synchronize()
        self.synchronized = False

        def reduced_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            if not self._up_to_date:
                self.synchronize()
            self.synchronized = False
            return self._agreed(loss) if agree and self.buckets else loss

        return reduced_closure

    @property
    def _up_to_date(self) -> bool:
        """Whether the gradients that are there have been reduced already."""
        return self.synchronized and not self.thrown_away

    def _check_still(self) -> None:
        if self.under_way:
            raise AssertionError(_SKIPPED)

    def begin(self) -> None:
        super().begin()
        self.synchronized = False

    def abandon(self) -> None:
        if self.under_way:
            try:
                self.synchronize()  # also what this rank has not sent, for others may have
            except Exception:  # for example that the job has failed, which is why a state is loaded
                pass
        self.rewind()
        self.synchronized = False

    def _begins_now(self) -> bool:
        self.synchronized = False
        return super()._begins_now()

    # One bucket

    def send(self, bucket: Bucket) -> None:
        bucket.after.clear()
        tensors: list[torch.Tensor] = []
        slots: list[Slot] = []
        strided = torch.strided
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = self._nothing(slot)
            if gradient.layout is not strided:
                if not self.settings.sparse_as_dense:
                    self._send_sparse(slot, gradient)
                    continue
                slot.parameter.grad = gradient = gradient.to_dense()
            if self._single is not NoneCompressor or not gradient.is_contiguous():
                gradient = self._compressed(bucket, gradient)
            tensors.append(gradient)
            slots.append(slot)
        settings = self.settings
        if self._whole is not None:
            gradients = {slot.name: tensor.detach() for slot, tensor in zip(slots, tensors, strict=True)}
            memory = {slot.name: slot.memory for slot in slots}
            collectives = BucketCollectives(bucket.name, settings.op, self._process_set)
            bucket.handle = Reduction(self._whole.reduce(gradients, memory, collectives))
            return
        bucket.handle = bucket.submit(
            slots,
            tensors,
            settings.op,
            self._process_set.process_set_id,
            settings.line,
            1.0 / settings.predivide,
            settings.predivide,
        )

    def _nothing(self, slot: Slot) -> torch.Tensor:
        """The gradient of a parameter that backward did not reach."""
        parameter = slot.parameter
        gradient: torch.Tensor
        if slot.sparse and not self.settings.sparse_as_dense:
            gradient = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
                parameter.shape,
                device=parameter.device,
            )
        else:
            gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        if parameter.requires_grad:  # a parameter that was frozen since stays without a gradient
            parameter.grad = gradient
        return gradient

    def _compressed(self, bucket: Bucket, gradient: torch.Tensor) -> torch.Tensor:
        """The contiguous, compressed tensor that travels for a gradient; notes what undoes it."""
        compressed, context = self._single.compress(gradient.detach())
        travels: torch.Tensor = compressed.contiguous()
        if travels is not gradient:
            bucket.after.append(partial(self._restore, gradient, travels, context))
        return travels

    def _restore(self, gradient: torch.Tensor, travelled: torch.Tensor, context: Any) -> None:
        with torch.no_grad():
            gradient.copy_(self._single.decompress(travelled, context))

    def _send_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.sparse = True
        bucket, settings = slot.bucket, self.settings
        result = sparse_allreduce_async(gradient.detach(), f"{bucket.name}.{slot.name}", settings.op, self._process_set)

        def finish() -> None:
            slot.parameter.grad = result()

        bucket.after.append(finish)

    def _agreed(self, loss: Any) -> Any:
        """The ranks' losses reduced as the gradients are, so that all decide alike."""
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        allreduce_(common, name=f"{self.name}.loss", op=self.settings.op, process_set=self._process_set)
        return common.to(loss) if isinstance(loss, torch.Tensor) else common.item()
