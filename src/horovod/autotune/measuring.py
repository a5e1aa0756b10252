"""Measures the speed of a job: the bytes per second of its collectives, over a number of steps. Pure.

A measurement begins with a collective and ends when one name has come again a given number of times. Each name comes once in
each step, so a measurement has whole steps. The speed of some settings is the median of several measurements, so a single one
in which the script saves a checkpoint has no effect.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

MEASUREMENTS = 5
"""The number of measurements in one trial."""

_MOST_NAMES = 100_000
"""The most names in a measurement, after which it starts again: names that come only once must not fill the memory."""


class Meter:
    """Measures one trial after another.

    Args:
        steps: how often a name must be seen again in a measurement.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._seen: Counter[str] = Counter()
        self._bytes = 0
        self._began = -1.0
        self._found: list[float] = []

    def restart(self) -> None:
        """Begin a new trial with the next collective."""
        self._found.clear()
        self.interrupt()

    def interrupt(self) -> None:
        """Restart the present measurement, because something other than training has happened."""
        self._seen.clear()
        self._bytes, self._began = 0, -1.0

    def seen(self, name: str, nbytes: int, now: float) -> float | None:
        """Count one collective. Returns the speed in bytes a second if the trial ends before it."""
        if self._began < 0:
            self._began = now
        if self._seen[name] >= self._steps and now > self._began:
            self._found.append(self._bytes / (now - self._began))
            self.interrupt()
            self._began = now
        elif len(self._seen) > _MOST_NAMES:
            self.interrupt()
            self._began = now
        self._seen[name] += 1
        self._bytes += nbytes
        if len(self._found) < MEASUREMENTS:
            return None
        score = median(self._found)
        self._found.clear()
        return score


class Recurring:
    """The digest of the repeated tensors, which identifies what a job trains.

    Buckets and batches change with the settings, tensors do not.

    Args:
        times: how often one must be seen.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._seen: Counter[str] = Counter()

    def seen(self, tensor: str) -> None:
        self._seen[tensor] += 1

    def most(self) -> int:
        """How often the most frequent tensor was seen."""
        return max(self._seen.values(), default=0)

    def found(self) -> list[str]:
        """Those seen often enough, in order."""
        return sorted(name for name, times in self._seen.items() if times >= self._times)
