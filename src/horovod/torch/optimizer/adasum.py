"""``DistributedOptimizer(op=hvd.Adasum)``: ranks reduce what a step changes, not the gradients it is made from.

Every rank lets the wrapped optimizer make a step of its own; the differences that these steps make to the parameters are
combined with Adasum, and the parameters become what they were before plus the combined difference. So momentum, Adam's
moments and the like see local gradients and stay local, and the combination sees steps of comparable length.

When a bucket's gradients are ready it steps at once: the wrapped optimizer is run on the bucket's parameters alone, the
difference is taken and sent, and the parameters are put back until ``step()``. That is safe inside backward: whatever reads a
parameter to compute a gradient has done so when its own gradient is complete.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.process_set import global_process_set
from horovod.torch.compression import Compressor
from horovod.torch.optimizer.buckets import Bucket
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.readiness import Readiness
from horovod.torch.optimizer.settings import Settings
from horovod.torch.optimizer.wrapped import WrappedOptimizer

_CHANGED = (
    "The gradient of {name!r} was changed after backward, which has no effect with op=hvd.Adasum: steps are made during "
    "backward. Clip or scale the loss instead, or use hvd.Average."
)


class AdasumReduction(Readiness):
    """The distributed part of an optimizer whose steps are combined."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        assert isinstance(settings.compression, type), "whoever made the settings refuses what reduces whole buckets"
        self._compression: type[Compressor] = settings.compression
        super().__init__(optimizer, settings, identity)

    def finish(self) -> None:
        """Send what backward has not completed, wait for everything, and move the parameters."""
        self.check_not_paused("step()")
        error = self.send_all()
        for bucket in self.buckets:
            try:
                bucket.wait(_CHANGED)
            except BaseException as failure:
                error = error or failure
        if error is not None:
            self.forget()
            raise error
        with torch.no_grad():
            for bucket in self.buckets:
                for move in bucket.after:
                    move()
        self._reset()
        self.end_step()

    def end_backward(self) -> None:
        """Gradients stay this rank's own; the parameters move in ``step()``."""

    def abandon(self) -> None:
        for bucket in self.buckets:
            try:
                bucket.wait(_CHANGED)
            except Exception:  # for example that the job has failed, which is why a state is loaded
                pass
        self.forget()

    def before_scaler_steps(self) -> None:
        raise AssertionError(
            "a gradient scaler cannot be used with op=hvd.Adasum: steps are made during backward, with scaled gradients"
        )

    def send(self, bucket: Bucket) -> None:
        """Step locally on a bucket's parameters, send the differences, and put the parameters back.

        A parameter without a gradient stays as it is; Adasum gives such a rank no say.
        """
        travelling: list[torch.Tensor] = []
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
                travels = compressed.contiguous()
                travelling.append(travels)
                bucket.after.append(partial(self._move, p, travels, context))
        bucket.mark_sent([slot.parameter.grad for slot in bucket.slots])
        bucket.handle = bucket.submit(
            bucket.slots, travelling, ReduceOp.ADASUM, global_process_set.process_set_id, self.settings.line
        )

    def _move(self, parameter: torch.Tensor, travelled: torch.Tensor, context: Any) -> None:
        delta = self._compression.decompress(travelled, context)
        parameter.add_(torch.view_as_complex(delta) if parameter.dtype.is_complex else delta)

    def _local_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """One step of the wrapped optimizer that sees only these parameters, without the hooks around its steps."""
        optimizer, members = self.optimizer, set(parameters)
        assert isinstance(optimizer, AdasumOptimizer)
        step = super(AdasumOptimizer, optimizer).step.__func__  # type: ignore[attr-defined]  # a bound method's
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        groups = optimizer.param_groups
        everything = list(groups)
        everyone = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if p in members]
            groups[:] = [group for group in groups if group["params"]]
            step(optimizer)
        finally:
            groups[:] = everything
            for group, all_of_it in zip(groups, everyone, strict=True):
                group["params"] = all_of_it


class AdasumOptimizer(WrappedOptimizer):
    """The methods in front of the wrapped optimizer's own. Never instantiated under this name."""

    _horovod: AdasumReduction
    _readiness = AdasumReduction

    def synchronize(self) -> None:
        """Does nothing: gradients are not reduced. Here for scripts that call it."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible: the reduction is part of the step.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.optim.Optimizer.profile_hook_step  # so the hooks of a step run around all of it, once
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined differences and apply them. Every rank calls it after the same number of backward passes.

        Args:
            closure: called first; evaluates the model and calls backward.

        Returns:
            What the closure returned, else None.

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
