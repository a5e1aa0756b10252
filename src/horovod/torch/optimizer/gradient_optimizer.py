"""The methods in front of an optimizer that steps with reduced gradients."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.torch.optimizer.compressor_state import MEMORY, load_memory, saved_memory
from horovod.torch.optimizer.gradient_reduction import GradientReduction
from horovod.torch.optimizer.wrapped import WrappedOptimizer


class GradientOptimizer(WrappedOptimizer):
    """Never instantiated under this name."""

    _horovod: GradientReduction
    _readiness = GradientReduction

    def synchronize(self) -> None:
        """Reduce what is not under way yet, and wait until every gradient is reduced. Every rank calls it.

        Where backward reaches every parameter on every rank, the gradients are reduced when ``backward()`` returns, and
        there is nothing to do. Otherwise call it before looking at gradients, for example to clip them, and then step
        inside :meth:`skip_synchronize`.

        Raises:
            HorovodInternalError: the reduction failed; the text names ranks, tensors and lines.
            AssertionError: inside ``no_sync()``; or a gradient was changed while it was being reduced.
        """
        self._horovod.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A block in which ``step()`` does not synchronise, because ``synchronize()`` was called already."""
        return self._horovod.skipping()

    def step(self, closure: Any = None) -> Any:
        """Step with reduced gradients; reduce first what backward has not completed. Every rank calls it.

        Args:
            closure: evaluates the model and calls backward; gradients are reduced after each call of it. An optimizer that
                decides by the loss must see the same loss on every rank: for LBFGS it is reduced like the gradients, an
                optimizer of your own needs a closure that does so.

        Returns:
            What the wrapped optimizer's ``step`` returns.

        Raises:
            HorovodInternalError: the reduction failed; the text names ranks, tensors and lines.
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
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. Use `with optimizer.skip_synchronize():` around step().",
                stacklevel=2,
            )
        result = base.step()
        reduction.end_step()
        return result

    # PyTorch puts its step hooks around the `step` of a class that has no such mark; the wrapped optimizer's has them.
    step.hooked = True  # type: ignore[attr-defined]  # a function's attribute

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's; with a compressor that has a memory, also that, under a key of its own.

        An optimizer without Horovod takes it as well, and leaves the memory alone. A rank's memory is partly its own, so
        a training that is to go on as if it had not been interrupted saves and loads one on every rank.
        """
        state: dict[str, Any] = super().state_dict()
        memory = saved_memory(self._horovod.slots.values(), self._horovod.settings)
        return state if memory is None else {**state, MEMORY: memory}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; the step under way is forgotten.

        What a compressor remembers is taken over if it is there: all of it where this rank of a job of this size saved it,
        otherwise what is alike on all ranks.
        """
        plain = {key: value for key, value in state_dict.items() if key != MEMORY}
        super().load_state_dict(plain, *args, **kwargs)
        if MEMORY in state_dict:
            load_memory(self._horovod.slots.values(), self._horovod.settings, state_dict[MEMORY])
