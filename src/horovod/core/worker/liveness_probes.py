"""Has the liveness monitor ask the other ranks whether they answer, while a thread waits long for them. A stopped rank closes
no connection, so nothing else finds it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


class LivenessProbes:
    """The probes of one thread.

    Args:
        probe: asks all ranks.
        timeout: the time limit of the job. A third of it is how long a wait lasts before a probe, and the time between probes.
    """

    def __init__(self, probe: Callable[[], None], timeout: timedelta) -> None:
        self._probe = probe
        self._interval = timeout.total_seconds() / 3
        self._next = 0.0

    def look(self, since: float) -> float:
        """Probe if it is time. Returns the seconds until the next probe.

        Args:
            since: since when the thread has waited (``time.monotonic``).
        """
        now = time.monotonic()
        due = max(since + self._interval, self._next)
        if now >= due:
            self._probe()
            self._next = due = now + self._interval
        return due - now
