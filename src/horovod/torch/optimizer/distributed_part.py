"""The base of the distributed parts of all optimizers: ``no_sync()``, schedulers, and the interface that their methods call."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.core.lifecycle.context import is_initialized
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.parameters import OptimizerParameters, ParameterListener
from horovod.torch.optimizer.settings import OptimizerSettings, check_passes

_INSIDE_NO_SYNC = "inside optimizer.no_sync() gradients are not reduced; leave the block before {what}"


class DistributedPart(ParameterListener):
    """The distributed part of one optimizer.

    Args:
        optimizer: the distributed optimizer, before it has its distributed part.
        settings: the settings of the optimizer.
        identity: the source of its name.

    Attributes:
        parameters: its parameters and their buckets.
        is_paused: whether the script is inside ``no_sync()``.
        is_loaded: whether the optimizer was pickled. The script may then wrap it again.
    """

    is_loaded = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        self.is_paused = False
        self.settings = settings
        self.identity = identity
        self._original: weakref.ref[torch.optim.Optimizer] | None = None
        self.parameters = OptimizerParameters(optimizer, settings, identity, self)
        self.parameters.adopt()

    @abstractmethod
    def zero_grad(self) -> None:
        """Called when the script is about to discard the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Abandon the present step, whether or not its reductions succeed."""

    @abstractmethod
    def before_scaler_steps(self) -> None:
        """Called before a gradient scaler steps. The scaler has unscaled the gradients, or does so next.

        Raises:
            AssertionError: the gradients are not reduced.
        """

    @abstractmethod
    def rewind(self) -> None:
        """Restart the count of passes."""

    def prepare(self) -> None:
        """Make buckets for the running generation, unless they exist. Cheap if nothing has changed.

        Raises:
            HorovodInternalError: no generation runs.
        """
        self.parameters.prepare()

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
            self.prepare()

    def set_passes(self, passes: int) -> None:
        self.parameters.passes = check_passes(passes)
        self.rewind()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which backward passes are not counted."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def check_not_paused(self, what: str) -> None:
        """Raise AssertionError inside :meth:`paused`. ``what`` is the call of the script, for the text."""
        if self.is_paused:
            raise AssertionError(_INSIDE_NO_SYNC.format(what=what))
