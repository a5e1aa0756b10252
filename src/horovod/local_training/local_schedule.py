"""The arguments of local training, checked, and what they say about each step. Pure."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from horovod.local_training.outer_sgd import OuterSGD

MIXING = 0.5
"""How much of the local parameters stays when a fragment arrives late, as in arXiv:2501.18512, section 3.2."""


@dataclass(frozen=True)
class LocalSchedule:
    """The checked arguments of local training. They must be the same on all ranks.

    After step t, counted from 1, fragment p of P is sent if t is ``(p + 1) * every // P`` or a multiple of ``every`` later, and
    is applied ``delay`` steps after that.

    Args:
        every: the number of steps between two outer steps of a parameter.
        outer: the outer optimizer.
        fragments: the number of parts of the model, which are sent at different steps.
        delay: how many steps a fragment travels while training goes on.
        mixing: the share of the local parameter in what a rank continues with when a fragment arrives. The rest is the outer
            parameter. None: 0 without a delay, otherwise :data:`MIXING`.

    Raises:
        ValueError: an argument is wrong. The text says which.
    """

    every: int
    outer: OuterSGD
    fragments: int
    delay: int
    mixing: float

    @classmethod
    def checked(cls, every: Any, outer: Any, fragments: Any, delay: Any, mixing: Any) -> LocalSchedule:
        """The schedule for arguments of a script."""
        steps = _whole("every", every, 1)
        parts = _whole("fragments", fragments, 1)
        late = _whole("delay", delay, 0)
        if not isinstance(outer, OuterSGD):
            raise ValueError(
                f"outer={outer!r}: pass an hvd.OuterSGD(lr=0.7, momentum=0.9, nesterov=True); optimizers of a framework need "
                "parameters, which local training makes itself"
            )
        if parts > steps:
            raise ValueError(
                f"fragments={parts}, every={steps}: at most one fragment is sent a step; use fewer fragments"
            )
        if late >= steps:
            raise ValueError(
                f"delay={late}, every={steps}: a fragment must arrive before it is sent again; use a smaller delay"
            )
        if mixing is None:
            mixing = MIXING if late else 0.0
        if isinstance(mixing, bool) or not isinstance(mixing, int | float) or not 0 <= mixing < 1:
            raise ValueError(f"mixing={mixing!r}: must be a number of at least 0 and below 1")
        return cls(steps, outer, parts, late, float(mixing))

    def sent(self, step: int) -> list[int]:
        """The fragments that are sent after a step."""
        return [
            part
            for part in range(self.fragments)
            if step >= (first := self.first(part)) and (step - first) % self.every == 0
        ]

    def arriving(self, step: int) -> list[int]:
        """The fragments that are applied after a step."""
        return self.sent(step - self.delay)

    def first(self, fragment: int) -> int:
        """The step after which a fragment is sent for the first time."""
        return (fragment + 1) * self.every // self.fragments

    @property
    def timing(self) -> tuple[int, int, int]:
        """What must be the same in a checkpoint for the fragments on their way to be of use."""
        return self.every, self.fragments, self.delay


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    return number
