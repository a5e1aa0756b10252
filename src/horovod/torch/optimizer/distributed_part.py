"""The base of the distributed parts of all optimizers: the interface that their methods call."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from horovod.core.lifecycle.context import is_initialized
from horovod.torch.optimizer.counted_passes import CountedPasses
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.uncompiled import uncompiled


@uncompiled
class DistributedPart(ABC):
    """The distributed part of one optimizer. It holds the objects that do the work, which do not know it.

    Attributes:
        parameters: its parameters and their buckets.
        passes: its backward passes.
        settings: the settings of the optimizer.
    """

    def __init__(self, parameters: OptimizerParameters, passes: CountedPasses) -> None:
        self.parameters = parameters
        self.passes = passes
        self.settings = parameters.settings
        self._original: weakref.ref[torch.optim.Optimizer] | None = None

    def zero_grad(self) -> None:
        """Called when the script is about to discard the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if is_initialized():
            self.parameters.follow()
            self.parameters.prepare()
        self.passes.discard()

    @abstractmethod
    def abandon(self) -> None:
        """Abandon the present step, whether or not its reductions succeed."""

    @abstractmethod
    def before_scaler_steps(self) -> None:
        """Called before a gradient scaler steps. The scaler has unscaled the gradients, or does so next.

        Raises:
            AssertionError: the gradients are not reduced.
        """

    def derived_from(self, original: torch.optim.Optimizer) -> None:
        """Remember the optimizer that the user wrapped. A learning-rate scheduler may refer to it."""
        self._original = weakref.ref(original)

    def tell_schedulers(self) -> None:
        """Mark the original optimizer as stepped, so that its learning-rate scheduler does not warn."""
        original: Any = self._original() if self._original is not None else None
        if original is not None:
            original._opt_called = True  # PyTorch's schedulers check this,
            original._step_count = 1  # or this before 2.4

    def add_parameters(self) -> None:
        """Adopt parameters that were added to the optimizer, perhaps in the middle of a step."""
        self.parameters.adopt()
        if self.parameters.generation >= 0 and is_initialized():
            self.parameters.prepare()
