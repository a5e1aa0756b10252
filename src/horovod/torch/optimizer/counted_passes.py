"""What all distributed optimizers know of their backward passes: how many a step has, and whether they count at present."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.torch.optimizer.parameters import GradientListener
from horovod.torch.optimizer.settings import check_passes

_INSIDE_NO_SYNC = "inside optimizer.no_sync() gradients are not reduced; leave the block before {what}"
ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This would clear gradients that are being reduced."
)


class CountedPasses(GradientListener):
    """The passes of one optimizer. Its subclasses count them: for the whole optimizer, or with Adasum for each parameter.

    Args:
        per_step: the number of backward passes per step.

    Attributes:
        per_step: the same at present.
        is_paused: whether the script is inside ``no_sync()``.
    """

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.is_paused = False

    @abstractmethod
    def discard(self) -> None:
        """Reset the state, because the script discards the gradients.

        Raises:
            AssertionError: gradients are being reduced, or will be when the running pass ends.
        """

    @abstractmethod
    def forget(self) -> None:
        """Abandon the present step: no reduction is running, and no gradient is known."""

    @abstractmethod
    def restart(self) -> None:
        """Restart the count of passes."""

    def set_per_step(self, passes: int) -> None:
        """Change the number of passes per step, and restart their count. Raises ValueError if it is not a positive integer."""
        self.per_step = check_passes(passes)
        self.restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which backward passes are not counted."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


def paused_error(what: str) -> AssertionError:
    """The error of a script that calls ``what`` inside :meth:`CountedPasses.paused`."""
    return AssertionError(_INSIDE_NO_SYNC.format(what=what))
