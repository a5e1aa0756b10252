"""``DistributedOptimizer``: an optimizer of MXNet, for ``Module`` and for loops of one's own, that averages gradients first."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from horovod.core.process_set import ProcessSet, global_process_set
from horovod.mxnet.training.gradients import Gradients

_OWN = {"_optimizer", "_gradients", "_settings"}


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]  # untyped base
    """Wraps an optimizer: ``update`` first averages the gradients over the ranks of ``process_set``, in place.

    What is asked of it or set on it, such as ``learning_rate``, is the wrapped optimizer's. Gradients are added up, and the
    optimizer's ``rescale_grad`` is divided by the number of ranks when it is wrapped. A script that sets ``rescale_grad`` later
    must divide it by the number of ranks itself. On ranks that are not members of the set, this is the wrapped optimizer.

    Args:
        optimizer: of MXNet.
        gradient_predivide_factor: the gradients are divided by it before they are added and multiplied afterwards.
        num_groups: in how many requests the gradients of one call travel, of one type each; 0: it is left to Horovod.
        process_set: the ranks that train together.

    Raises:
        ValueError: bad arguments, or the process set is not registered.
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
        # The base class is not initialised: all that it would have is the wrapped optimizer's.
        own_set = None if process_set is global_process_set else process_set  # that of the job which it is unpickled in
        self._wrap(optimizer, (gradient_predivide_factor, num_groups, own_set))
        optimizer.rescale_grad *= self._gradients.rescale()

    def _wrap(self, optimizer: Any, settings: tuple[Any, Any, ProcessSet | None]) -> None:
        self._optimizer = optimizer
        self._settings = predivide, num_groups, own_set = settings
        kind = f"DistributedOptimizer.{type(optimizer).__name__}"
        self._gradients = Gradients(kind, predivide, num_groups, own_set or global_process_set)

    def unwrap(self) -> Any:
        """The wrapped optimizer, for use on its own."""
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

    def _reduce(self, index: Any, grad: Any) -> None:
        if self._gradients.active():
            several = isinstance(index, list | tuple)
            indices, gradients = (index, grad) if several else ([index], [grad])
            self._gradients.reduce([str(each) for each in indices], gradients)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
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
