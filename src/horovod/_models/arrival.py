"""The state of a gradient when it reaches the optimizer that applies it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from horovod.observe.call_site import caller, warn


class Arrival(Enum):
    """The state in which a gradient reaches a distributed optimizer.

    Attributes:
        LOCAL: unchanged since the backward pass.
        REDUCED: reduced over the ranks, and perhaps changed since, for example clipped.
        CHANGED: not reduced, and changed since the backward pass.
        UNKNOWN: not known. The optimizer reduces it.
    """

    LOCAL = 1
    REDUCED = 2
    CHANGED = 3
    UNKNOWN = 4


class ChangeWarning:
    """Warns once that gradients reached an optimizer changed but not reduced.

    Args:
        method: the method of the optimizer that gets the gradients, for the text.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._given = False

    def give(self, labels: Sequence[str]) -> None:
        """Warn if there are any such gradients.

        Args:
            labels: the names of the variables whose gradients were changed.
        """
        if self._given or not labels:
            return
        self._given = True
        others = f" and {len(labels) - 1} others" if len(labels) > 1 else ""
        warn(
            f"Horovod: the gradients of {labels[0]}{others} reached {self._method} at {caller()} not reduced, but changed "
            "since the backward pass. Horovod reduces them as they are now. That is right for linear changes, such as adding "
            "gradients up or dividing them by a number. It is wrong for clipping, which then clips each rank's own gradients: "
            "call gradients = hvd.reduce_gradients(optimizer, gradients, variables) before it, or take the gradients of "
            "hvd.DistributedGradientTape",
        )
