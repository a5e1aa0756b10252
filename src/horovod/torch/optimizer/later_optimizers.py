"""Several optimizers over the same parameters. The one that was made last has the hooks, and reduces the gradients."""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING

import torch

from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.optimizer.gradient_passes import GradientPasses
from horovod.torch.optimizer.parameters import OptimizerParameters

if TYPE_CHECKING:
    from horovod.torch.optimizer.gradient_reduction import GradientReduction

_OTHER_SETTINGS = (
    "The parameter {name!r} also belongs to a DistributedOptimizer that was made later and reduces with other settings. "
    "Delete that optimizer before you step with this one."
)

_parts: weakref.WeakValueDictionary[int, GradientReduction] = weakref.WeakValueDictionary()
"""The parts of the optimizers of this process that reduce gradients, in the order in which they were made."""
_count = count()


def register_part(part: GradientReduction) -> None:
    """Let other optimizers find the part, as long as it exists."""
    _parts[next(_count)] = part


def has_any(parameter: torch.Tensor) -> bool:
    """Whether any optimizer of this process reduces gradients of the parameter."""
    return any(parameter in each.parameters.slots for each in _parts.values())


class LaterOptimizers:
    """The optimizers that were made later over some parameters of one optimizer.

    Args:
        parameters, passes: of that optimizer.
    """

    def __init__(self, parameters: OptimizerParameters, passes: GradientPasses) -> None:
        self._parameters = parameters
        self._passes = passes
        self._found: list[GradientReduction] = []
        self._at = -1

    def found(self) -> list[GradientReduction]:
        """Their parts. They reduce the gradients of these parameters."""
        if self._at != GradientHook.changes:
            self._at = GradientHook.changes
            self._found = self._look()
        return self._found

    def check(self) -> None:
        """Check the settings of those that :meth:`found` returns. Raises AssertionError if one reduces with others."""
        for other in self._found:
            if not other.settings.reduces_as(self._parameters.settings):
                shared = (slot.name for p, slot in self._parameters.slots.items() if p in other.parameters.slots)
                raise AssertionError(_OTHER_SETTINGS.format(name=next(shared)))

    def _look(self) -> list[GradientReduction]:
        slots = self._parameters.slots.values()
        found: list[GradientReduction] = []
        covered = 0
        lost = [slot for slot in slots if slot.hook is not None and not slot.hook.is_registered()]
        for other in list(_parts.values()) if lost else ():
            if other.parameters is self._parameters:
                continue
            for slot in lost:
                theirs = other.parameters.slots.get(slot.parameter)
                if theirs is not None and theirs.hook is not None and theirs.hook.is_registered():
                    covered |= slot.bit
                    if other not in found:
                        found.append(other)
        if left := [slot for slot in lost if not slot.bit & covered]:
            self._parameters.listen_again(left)
        self._passes.cover(covered)
        return found
