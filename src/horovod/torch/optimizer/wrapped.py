"""The methods that all distributed optimizers share, and :func:`wrap`, which adds them to an optimizer.

A distributed optimizer is of a new class, derived from a subclass of :class:`WrappedOptimizer` (the front) and from the class
of the original optimizer. It has the parameter groups and the state of the original.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.optimizer.data_loading import follow_data_loaders
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.settings import OptimizerSettings

_OWN = ("step", "_horovod", "_horovod_is_loaded")
"""Attributes that the wrapped optimizer does not have."""


class WrappedOptimizer(torch.optim.Optimizer):
    """The methods that all distributed optimizers share.

    Copies and pickled optimizers are distributed, too. One that is loaded before ``hvd.init()`` is of the wrapped class.
    """

    _horovod: DistributedPart
    _horovod_is_loaded = False
    """Whether it was pickled. The script may then wrap it again."""

    def _distribute(self, settings: OptimizerSettings, identity: OptimizerIdentity) -> None:
        """Make the distributed part, ``_horovod``."""
        raise NotImplementedError

    @property
    def op(self) -> ReduceOp:
        return self._horovod.settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        return self._horovod.settings.predivide

    @property
    def sparse_as_dense(self) -> bool:
        return self._horovod.settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        return self._horovod.settings.process_set

    @property
    def backward_passes_per_step(self) -> int:
        return self._horovod.passes.per_step

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return dict(self._horovod.parameters.names)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The wrapped optimizer's attribute. ``torch.amp.GradScaler.step()`` reads it before anything else."""
        self._horovod_before_scaler()
        supports: bool = vars(self).get("_step_supports_amp_scaling", False)
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def _horovod_before_scaler(self) -> None:
        """Called before a gradient scaler steps. Raises AssertionError if the gradients are not reduced."""
        self._horovod.before_scaler_steps()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients locally over this many backward passes before they are reduced.

        The count of passes restarts at 0. Running reductions are not changed. Every rank must call it between the same passes.

        Raises:
            ValueError: ``passes`` is not a positive integer.
        """
        self._horovod.passes.set_per_step(passes)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes only accumulate gradients. They are not counted, and nothing is sent.

        As with PyTorch's DistributedDataParallel, run all passes of a step but the last inside the context. If all passes are
        inside, ``step()`` reduces the accumulated gradients. Call ``step()`` outside of the context.
        """
        return self._horovod.passes.paused()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Call the wrapped optimizer's method, and discard the count of backward passes.

        Args:
            set_to_none: None means the default of the wrapped optimizer, which is True in PyTorch.

        Raises:
            AssertionError: gradients are being reduced. Call ``step()`` or ``synchronize()`` first.
        """
        self._horovod.zero_grad()
        if set_to_none is None:
            super().zero_grad()
        else:
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer. Every rank must add the same parameters before the same step."""
        super().add_param_group(param_group)
        self._horovod.add_parameters()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, and abandon the present step.

        The parameter groups remain the same objects, so a learning-rate scheduler that was made for the original optimizer
        still works.
        """
        self._horovod.abandon()
        groups = self.param_groups
        before = list(groups)
        super().load_state_dict(state_dict, *args, **kwargs)
        loaded = self.param_groups
        if loaded is groups:
            return
        for group, values in zip(before, loaded, strict=True):
            if group is not values:
                group.clear()
                group.update(values)
        loaded[:] = before
        if vars(self).get("param_groups") is loaded:
            self.param_groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settings = self._horovod.settings
        plain = copy.deepcopy(self._plain(), memo)
        names, groups = copy.deepcopy((self._horovod.parameters.names, settings.groups), memo)
        wrapped = wrap(
            plain, _front(type(self)), settings.over(names, groups), self._horovod.parameters.identity.copied()
        )
        memo[id(self)] = wrapped
        return wrapped

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain, settings = self._plain(), self._horovod.settings
        settings = settings.over(self._parameter_names, settings.groups)
        return _loaded, (
            type(plain),
            plain.__getstate__(),
            _front(type(self)),
            settings,
            self._horovod.parameters.identity.copied(),
        )

    def _plain(self) -> torch.optim.Optimizer:
        """An optimizer of the wrapped class that shares its parameter groups and state with this one."""
        kind: Any = type(self).__bases__[1]
        plain: torch.optim.Optimizer = kind.__new__(kind)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name not in _OWN})
        return plain


def _loaded(
    kind: type[torch.optim.Optimizer],
    state: dict[str, Any],
    front: type[WrappedOptimizer],
    settings: OptimizerSettings,
    identity: OptimizerIdentity,
) -> torch.optim.Optimizer:
    """The distributed optimizer that was pickled.

    Args:
        kind, state: the class and the state of the optimizer that it has wrapped.

    Raises:
        ValueError: its process set does not exist here.
    """
    plain: Any = object.__new__(kind)
    plain.__setstate__(state)
    if not settings.serve_here(kind.__name__):
        return plain  # type: ignore[no-any-return]
    follow_data_loaders()
    wrapped: WrappedOptimizer = wrap(plain, front, settings, identity)
    wrapped._horovod_is_loaded = True
    return wrapped


def _front(derived: type) -> type[WrappedOptimizer]:
    """The front from which :func:`wrap` derived a class."""
    front: type[WrappedOptimizer] = derived.__bases__[0]
    return front


def wrap(
    optimizer: torch.optim.Optimizer,
    front: type[WrappedOptimizer],
    settings: OptimizerSettings,
    identity: OptimizerIdentity,
) -> Any:
    """An optimizer of a class derived from ``front`` and the class of ``optimizer``, with its parameter groups and state."""
    kind = type(optimizer)
    derived: Any = type(
        kind.__name__, (front, kind), {"__module__": "horovod.torch.optimizer", "__doc__": kind.__doc__}
    )
    wrapped = derived.__new__(derived)
    # A learning-rate scheduler of the original sets an attribute `step`, which would hide the method of the front.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._distribute(settings, identity)
    wrapped._horovod.derived_from(optimizer)
    return wrapped
