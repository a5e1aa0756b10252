"""``DistributedOptimizer(op=hvd.Adasum)``: the ranks combine the changes of the parameters, not the gradients.

On every rank the wrapped optimizer makes a step with local gradients. Adasum combines the ranks' changes, and each parameter
becomes its value before the step plus the combined change. Momentum, Adam's moments and other state see only local gradients
and stay local.

The local step is made bucket by bucket. When the gradients of a bucket are ready, the wrapped optimizer steps on the parameters
of this bucket. The rank sends the change, and restores the parameters until ``step()``. This is safe inside backward: once a
parameter's gradient is complete, backward does not read the parameter any more.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.torch.compression import Compressor
from horovod.torch.optimizer.adasum_passes import AdasumPasses
from horovod.torch.optimizer.buckets import Bucket
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.optimizer.wrapped import WrappedOptimizer

_CHANGED = (
    "The gradient of {name!r} was changed after backward, which has no effect with op=hvd.Adasum: steps are made during "
    "backward. Clip or scale the loss instead, or use hvd.Average."
)


class AdasumReduction(AdasumPasses):
    """The distributed part of an optimizer with Adasum."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        assert isinstance(settings.compression, type), "check_arguments() refuses a BucketCompressor with Adasum"
        self._compression: type[Compressor] = settings.compression
        super().__init__(optimizer, settings, identity)

    def finish(self) -> None:
        """Send all remaining buckets, wait for all buckets, and apply the combined changes."""
        self.check_not_paused("step()")
        error = self.send_all()
        for bucket in self.parameters.buckets:
            try:
                bucket.wait(_CHANGED)
            except BaseException as failure:
                error = error or failure
        if error is not None:
            self.forget()
            raise error
        with torch.no_grad():
            for bucket in self.parameters.buckets:
                for move in bucket.after:
                    move()
        self.end_step()

    def abandon(self) -> None:
        for bucket in self.parameters.buckets:
            try:
                bucket.wait(_CHANGED)
            except Exception:  # for example, the job has failed and the script restores a state
                pass
        self.forget()

    def before_scaler_steps(self) -> None:
        raise AssertionError(
            "a gradient scaler cannot be used with op=hvd.Adasum: steps are made during backward, with scaled gradients"
        )

    def send(self, bucket: Bucket) -> None:
        """Step locally on a bucket's parameters, send the changes, and restore the parameters.

        A parameter without a gradient does not change on this rank. Adasum ignores a change of zeros.
        """
        deltas: list[torch.Tensor] = []
        parameters = [slot.parameter for slot in bucket.slots]
        bucket.after.clear()
        with torch.no_grad():
            starts = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
            self._local_step(parameters)
            for p, start in zip(parameters, starts, strict=True):
                delta = p.detach() - start
                p.copy_(start)
                if delta.dtype.is_complex:
                    delta = torch.view_as_real(delta)
                compressed, context = self._compression.compress(delta)
                sent = compressed.contiguous()
                deltas.append(sent)
                bucket.after.append(partial(self._move, p, sent, context))
        bucket.mark_sent([slot.parameter.grad for slot in bucket.slots])
        bucket.handle = bucket.submit(bucket.slots, deltas, ReductionArguments(ReduceOp.ADASUM), self.settings.line)

    def _move(self, parameter: torch.Tensor, received: torch.Tensor, context: Any) -> None:
        delta = self._compression.decompress(received, context)
        parameter.add_(torch.view_as_complex(delta) if parameter.dtype.is_complex else delta)

    def _local_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make one step of the wrapped optimizer with only these parameters, without its step hooks."""
        optimizer, members = self.parameters.optimizer, set(parameters)
        assert isinstance(optimizer, AdasumOptimizer)
        step = super(AdasumOptimizer, optimizer).step.__func__  # type: ignore[attr-defined]  # a bound method's
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        groups = optimizer.param_groups
        all_groups = list(groups)
        all_parameters = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if p in members]
            groups[:] = [group for group in groups if group["params"]]
            step(optimizer)
        finally:
            groups[:] = all_groups
            for group, parameters_of_group in zip(groups, all_parameters, strict=True):
                group["params"] = parameters_of_group


class AdasumOptimizer(WrappedOptimizer):
    """The methods of a distributed optimizer with Adasum."""

    _horovod: AdasumReduction
    _part = AdasumReduction

    def synchronize(self) -> None:
        """Does nothing, because gradients are not reduced. It exists for scripts that call it."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not supported, because the reduction is part of the step.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.optim.Optimizer.profile_hook_step  # so that step hooks run once, around the whole step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined changes and apply them. Every rank must call it after the same number of backward passes.

        Args:
            closure: called first; evaluates the model and calls backward.

        Returns:
            The closure's return value, or None without a closure.

        Raises:
            HorovodInternalError: the reduction failed; the text names ranks, tensors and lines.
            AssertionError: inside ``no_sync()``.
        """
        self._horovod.tell_schedulers()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._horovod.finish()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # a function's attribute
