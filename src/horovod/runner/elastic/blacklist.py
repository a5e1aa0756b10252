"""Hosts on which processes have failed, and for how long they get no new ones. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable


class Blacklist:
    """Hosts that get no new processes. Their running processes continue.

    Args:
        cooldown: the shortest and the longest time in seconds after which a host is tried again; None for never.
        jitter: returns a random number between 0 and 1, so that hosts that failed together do not come back together.
    """

    def __init__(self, cooldown: tuple[int, int] | None, jitter: Callable[[], float] = random.random) -> None:
        self._cooldown = cooldown
        self._jitter = jitter
        self._failures: Counter[str] = Counter()
        self._out: set[str] = set()

    def __contains__(self, host: str) -> bool:
        return host in self._out

    @property
    def ends(self) -> bool:
        """Whether hosts come back."""
        return self._cooldown is not None

    def add(self, host: str) -> float | None:
        """Record that a process has failed on a host. Returns after how many seconds to call :meth:`remove`; None for never.

        The time doubles with each failure, within the cooldown's limits. Call this only for hosts that are not on the list.
        """
        self._out.add(host)
        self._failures[host] += 1
        if self._cooldown is None:
            return None
        shortest, longest = self._cooldown
        doublings = min(self._failures[host], 32)
        return float(min(max(shortest * 2**doublings + self._jitter() * shortest, shortest), longest))

    def remove(self, host: str) -> None:
        """Take a host off the list: it may be tried again."""
        self._out.discard(host)
