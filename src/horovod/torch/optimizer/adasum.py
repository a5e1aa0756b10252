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

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.torch.optimizer.adasum_passes import AdasumPasses
from horovod.torch.optimizer.adasum_sender import AdasumSender
from horovod.torch.optimizer.counted_passes import paused_error
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.optimizer.wrapped import WrappedOptimizer
from horovod.torch.uncompiled import uncompiled

_CHANGED = (
    "The gradient of {name!r} was changed after backward, which has no effect with op=hvd.Adasum: steps are made during "
    "backward. Clip or scale the loss instead, or use hvd.Average."
)


@uncompiled
class AdasumReduction(DistributedPart):
    """The distributed part of an optimizer with Adasum."""

    passes: AdasumPasses

    def __init__(self, parameters: OptimizerParameters) -> None:
        passes = AdasumPasses(parameters, AdasumSender(parameters))
        super().__init__(parameters, passes)
        parameters.report_to(passes)

    def finish(self) -> None:
        """Send all remaining buckets, wait for all buckets, and apply the combined changes."""
        if self.passes.is_paused:
            raise paused_error("step()")
        error = self.passes.send_all()
        for bucket in self.parameters.buckets:
            try:
                bucket.wait(_CHANGED)
            except BaseException as failure:
                error = error or failure
        if error is not None:
            self.passes.forget()
            raise error
        with torch.no_grad():
            for bucket in self.parameters.buckets:
                for move in bucket.after:
                    move()
        self.passes.stepped()

    def abandon(self) -> None:
        for bucket in self.parameters.buckets:
            try:
                bucket.wait(_CHANGED)
            except Exception:  # for example, the job has failed and the script restores a state
                pass
        self.passes.forget()

    def before_scaler_steps(self) -> None:
        raise AssertionError(
            "a gradient scaler cannot be used with op=hvd.Adasum: steps are made during backward, with scaled gradients"
        )


class AdasumOptimizer(WrappedOptimizer):
    """The methods of a distributed optimizer with Adasum."""

    _horovod: AdasumReduction

    def _distribute(self, settings: OptimizerSettings, identity: OptimizerIdentity) -> None:
        self._horovod = AdasumReduction(OptimizerParameters(self, settings, identity))

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
