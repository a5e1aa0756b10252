"""``DistributedOptimizer``: an optimizer of MXNet, for ``Module`` and for custom loops, that averages gradients first."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.mxnet.training.gradients import Gradients

_OWN = {"_optimizer", "_gradients", "_settings", "_first"}


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]  # untyped base
    """Wraps an optimizer: ``update`` first averages the gradients over the ranks of ``process_set``, in place. Every member
    must call it.

    All attributes, such as ``learning_rate``, are those of the wrapped optimizer. Gradients are added up, and the optimizer's
    ``rescale_grad`` is divided by the number of ranks when it is wrapped. A script that sets ``rescale_grad`` later must divide
    it by the number of ranks itself. On ranks that are not members of the set, this behaves as the wrapped optimizer.

    Args:
        optimizer: an optimizer of MXNet.
        gradient_predivide_factor: gradients are divided by it before they are added up, and multiplied afterwards.
        num_groups: the number of groups into which the gradients of one call are divided; each group is one request per dtype.
            0: Horovod cuts by size.
        process_set: the ranks that train together.

    Raises:
        ValueError: an argument is wrong, or the process set is not registered.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ValueError(f"expected an mxnet.optimizer.Optimizer, not {type(optimizer).__name__}")
        # The base class is not initialised, because all attributes are those of the wrapped optimizer.
        own_set = None if process_set is global_process_set else process_set  # None: the global set
        self._wrap(optimizer, (gradient_predivide_factor, num_groups, own_set))
        optimizer.rescale_grad *= self._gradients.rescale()

    def _wrap(self, optimizer: Any, settings: tuple[Any, Any, ProcessSet | None]) -> None:
        self._optimizer = optimizer
        self._settings = predivide, num_groups, own_set = settings
        kind = f"DistributedOptimizer.{type(optimizer).__name__}"
        self._gradients = Gradients(kind, predivide, num_groups, own_set or global_process_set)
        self._first: tuple[int, Any] | None = None  # the generation, and the index whose update begins a step in it

    def unwrap(self) -> Any:
        """Undo the change of ``rescale_grad``, and return the wrapped optimizer, for use without this one."""
        self._optimizer.rescale_grad /= self._gradients.rescale()
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    @property
    def learning_rate(self) -> Any:
        return self._optimizer.learning_rate

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def _reduce(self, index: Any, weight: Any, grad: Any) -> None:
        if self._gradients.active():
            several = isinstance(index, list | tuple)
            indices, weights, gradients = (index, weight, grad) if several else ([index], [weight], [grad])
            generation = running().generation
            if self._first is None or self._first[0] != generation:
                self._first = generation, indices[0]
            if indices[0] == self._first[1]:
                named = {str(each): of for each, of in zip(indices, weights, strict=True)}
                self._gradients.compare(self._optimizer, named)
            self._gradients.reduce([str(each) for each in indices], gradients)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, weight, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, weight, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def __getstate__(self) -> tuple[Any, tuple[Any, Any, ProcessSet | None]]:
        return self._optimizer, self._settings

    def __setstate__(self, state: tuple[Any, tuple[Any, Any, ProcessSet | None]]) -> None:
        self._wrap(*state)
