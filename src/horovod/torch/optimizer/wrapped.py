"""What every distributed optimizer has in front of the wrapped optimizer's own methods, and how it gets there.

The wrapped optimizer gets a new class, derived from a front and its own, and keeps its parameter groups and its state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.process_set import ProcessSet
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.readiness import Readiness
from horovod.torch.optimizer.settings import Settings


class WrappedOptimizer(torch.optim.Optimizer):
    """The methods that all fronts share. Never instantiated under this name.

    Pickled, it becomes an optimizer of the wrapped class, without Horovod; a deep copy is distributed as the original is.
    """

    _horovod: Readiness
    _readiness: Callable[[torch.optim.Optimizer, Settings, Identity], Readiness]

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
        return self._horovod.passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return dict(self._horovod.names)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The wrapped optimizer's. ``torch.amp.GradScaler.step()`` asks for it before it does anything."""
        self._horovod.before_scaler_steps()
        supports: bool = vars(self).get("_step_supports_amp_scaling", False)
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients locally over this many backward passes before they are reduced.

        Passes since the last step do not count; gradients that are being reduced already go their way.

        Raises:
            ValueError: not a positive integer.
        """
        self._horovod.set_passes(passes)

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which backward passes only accumulate: they do not count, and nothing is sent.

        As in PyTorch's DistributedDataParallel: all passes of a step but the last go inside. Where all went inside, what has
        accumulated is reduced in ``step()``, which must be called outside.
        """
        return self._horovod.paused()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As the wrapped optimizer's. What has been accumulated does not count any more.

        Args:
            set_to_none: None leaves it to the wrapped optimizer, whose default is True in PyTorch.

        Raises:
            AssertionError: gradients are being reduced; call ``step()`` or ``synchronize()`` first.
        """
        self._horovod.zero_grad()
        if set_to_none is None:
            super().zero_grad()
        else:
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's. Every rank adds the same parameters before the same step."""
        super().add_param_group(param_group)
        self._horovod.add_parameters()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; the step under way is forgotten.

        The parameter groups stay the same objects, so a learning-rate scheduler that was made for the original goes on
        steering.
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
        names, groups = copy.deepcopy((self._horovod.names, settings.groups), memo)
        wrapped = wrap(plain, _front(type(self)), settings.over(names, groups), self._horovod.identity.copied())
        memo[id(self)] = wrapped
        return wrapped

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        return object.__new__, (type(plain),), plain.__getstate__()

    def _plain(self) -> torch.optim.Optimizer:
        """An optimizer of the wrapped class that shares everything with this one."""
        kind: Any = type(self).__bases__[1]
        plain: torch.optim.Optimizer = kind.__new__(kind)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name not in ("step", "_horovod")})
        return plain


def _front(derived: type) -> type[WrappedOptimizer]:
    """The front that :func:`wrap` put before the wrapped optimizer's class."""
    front: type[WrappedOptimizer] = derived.__bases__[0]
    return front


def wrap(
    optimizer: torch.optim.Optimizer, front: type[WrappedOptimizer], settings: Settings, identity: Identity
) -> Any:
    """The optimizer with the methods of ``front`` before its own: of a new class, with its groups and its state."""
    kind = type(optimizer)
    derived: Any = type(
        kind.__name__, (front, kind), {"__module__": "horovod.torch.optimizer", "__doc__": kind.__doc__}
    )
    wrapped = derived.__new__(derived)
    # A learning-rate scheduler that was made for the original left a bound `step` there, which would hide ours.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._horovod = front._readiness(wrapped, settings, identity)
    wrapped._horovod.derived_from(optimizer)
    return wrapped
