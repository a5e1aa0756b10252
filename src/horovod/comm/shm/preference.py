"""Which of two ways is the quicker one here, found out by going both.

Whether it pays to read large tensors where they lie depends on what nobody tells: whether the ranks' cores share a cache,
how large the pages of the tensors' memory are, who else uses the machine. Pure: all ranks that call it alike decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_WARM = 1
"""Tries of each way that do not count: they fetch memory, and find out what is worked out once."""

_TRIES = 3
"""Tries of each way that do, in turn; their median is compared."""

_REST = 50
_LONGEST_REST = 800
"""Calls after which the ways are tried again, at first and at most: each rest is twice as long as the one before."""


class Preference:
    """Of way 0 or way 1, for one kind of call that comes again and again.

    Attributes:
        way: which to go now.
        trying: whether the call is one of those to be timed (:meth:`took`).
    """

    def __init__(self) -> None:
        self.way = 0
        self.trying = True
        self._rest = _REST
        self._left = 0
        self._times: tuple[list[float], list[float]] = ([], [])

    def rested(self) -> None:
        """Count a call that was not timed."""
        self._left -= 1
        if self._left <= 0:
            self.trying = True

    def took(self, seconds: float) -> None:
        """Note how long this call took, and go the other way next."""
        self._times[self.way].append(seconds)
        self.way = 1 - self.way

    @property
    def due(self) -> bool:
        """Whether both ways have been tried, so that the ranks can :meth:`settle`."""
        return all(len(times) == _WARM + _TRIES for times in self._times)

    @property
    def medians(self) -> list[float]:
        """Of the times of each way on this rank, in seconds."""
        return [median(times[_WARM:]) for times in self._times]

    def settle(self, seconds: Sequence[float]) -> None:
        """Decide for a while.

        Args:
            seconds: what each way took, summed over the ranks; the same on all of them.
        """
        self.way = int(seconds[1] < seconds[0])
        self.trying = False
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        for times in self._times:
            times.clear()
