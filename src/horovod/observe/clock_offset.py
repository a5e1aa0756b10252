"""The offset between the clocks of two processes, from what they had in common. Pure.

A collective is agreed on only after every rank has submitted it. So for any two ranks, the submission on one is not later than
the agreement on the other: each collective bounds the offset from both sides, and many bound it closely. A message is not
received before it is sent, so each message bounds the offset from one side.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Moments(NamedTuple):
    """When a rank submitted a collective, and when it knew that all ranks had, by its clock."""

    submitted: float
    agreed: float


class ClockOffset:
    """What is to be added to another process's times, so that they are by this process's clock."""

    __slots__ = ("_high", "_low")

    def __init__(self) -> None:
        self._low, self._high = -math.inf, math.inf

    def __repr__(self) -> str:
        return f"ClockOffset({self.seconds:g} s, error {self.error:g} s)"

    def message(self, sent: float, received: float) -> None:
        """Learn from a message of the other process: ``sent`` is by its clock, ``received`` by this process's."""
        self._high = min(self._high, received - sent)

    def collective(self, here: Moments, there: Moments) -> None:
        """Learn from a collective of both: ``there`` is by the clock of the other process."""
        self._low = max(self._low, here.submitted - there.agreed)
        self._high = min(self._high, here.agreed - there.submitted)

    @property
    def seconds(self) -> float:
        """The best estimate; infinite if nothing is known. Without a collective, the quickest message took no time."""
        return (self._low + self._high) / 2 if self._low > -math.inf else self._high

    @property
    def error(self) -> float:
        """The greatest error of the estimate."""
        return abs(self._high - self._low) / 2
