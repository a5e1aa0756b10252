"""The methods of a distributed optimizer that steps with reduced gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as _of_all_optimizers

from horovod.observe.call_site import warn
from horovod.torch.optimizer.compressor_state import MEMORY, load_memory, saved_memory
from horovod.torch.optimizer.gradient_reduction import GradientReduction
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.optimizer.wrapped import WrappedOptimizer
from horovod.torch.uncompiled import traceable


class GradientOptimizer(WrappedOptimizer):
    """An optimizer that steps with reduced gradients: the base of all distributed optimizers, except those with Adasum."""

    _horovod: GradientReduction

    def _distribute(self, settings: OptimizerSettings, identity: OptimizerIdentity) -> None:
        self._horovod = GradientReduction(OptimizerParameters(self, settings, identity))

    def synchronize(self) -> None:
        """Reduce the gradients of passes inside ``no_sync()`` and those that were set by hand. Every rank must call it.

        Other gradients are already reduced when ``backward()`` returns. Afterwards, call ``step()`` inside
        :meth:`skip_synchronize`.

        Raises:
            HorovodInternalError: the reduction failed. The text names ranks, tensors and lines.
            AssertionError: inside ``no_sync()``, or a gradient was changed before it was reduced.
        """
        self._horovod.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A context in which ``step()`` does not synchronise, because ``synchronize()`` was called before."""
        return self._horovod.skipping()

    @traceable
    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients that are not reduced yet, and make a step. Every rank must call it.

        Args:
            closure: evaluates the model and calls backward. Gradients are reduced after each call. An optimizer whose decisions
                depend on the loss must get the same loss on every rank. For LBFGS, this method reduces the loss like the
                gradients. For a custom optimizer, the closure must do this.

        Returns:
            The return value of the wrapped optimizer's ``step``.

        Raises:
            HorovodInternalError: the reduction failed. The text names ranks, tensors and lines.
            AssertionError: inside ``no_sync()``; inside ``skip_synchronize()`` while gradients are being reduced; or a gradient
                was changed before it was reduced.
        """
        reduction = self._horovod
        reduction.tell_schedulers()
        base: Any = super()
        if closure is not None:
            result = base.step(reduction.reducing(closure, agree=isinstance(self, torch.optim.LBFGS)))
            reduction.end_step()
            return result
        if reduction.before_step():
            warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. Use `with optimizer.skip_synchronize():` around step().",
            )
        if not (_of_all_optimizers or vars(self).get("_optimizer_step_pre_hooks")):
            reduction.look()
            result = base.step()
        else:  # after those of the script, which may clip
            hook = self.register_step_pre_hook(lambda *_: reduction.look())
            try:
                result = base.step()
            finally:
                hook.remove()
        reduction.end_step()
        return result

    # Without this attribute PyTorch would add step hooks here too. The wrapped optimizer's `step` has them.
    step.hooked = True  # type: ignore[attr-defined]  # a function's attribute

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state. If the compressor keeps state (its memory), a separate key contains it.

        An optimizer without Horovod can load the result, and ignores the memory. A part of the memory differs between ranks.
        To continue exactly where training was interrupted, save and load the state on every rank.
        """
        state: dict[str, Any] = super().state_dict()
        memory = saved_memory(self._horovod.parameters.slots.values(), self._horovod.settings)
        return state if memory is None else {**state, MEMORY: memory}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, and abandon the present step.

        If the state contains the memory of a compressor, the memory is loaded, too: all of it if the same rank of a process set
        of the same size saved it, otherwise only the values that are equal on all ranks.
        """
        plain = {key: value for key, value in state_dict.items() if key != MEMORY}
        super().load_state_dict(plain, *args, **kwargs)
        if MEMORY in state_dict:
            load_memory(self._horovod.parameters.slots.values(), self._horovod.settings, state_dict[MEMORY])
