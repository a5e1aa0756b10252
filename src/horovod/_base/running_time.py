"""The time in which this process ran. A job that is stopped as a whole (Ctrl-Z, a batch system) does not stall meanwhile.

No clock of the kernel leaves out the time in which a process was stopped. So a thread that waits compares its turns with the
clock: it planned to wake at one moment, and does so much later. The time between does not count for limits on the progress of
others. A turn that is not late counts whole, so limits are reached.
"""

from __future__ import annotations

import threading

LATE_SECONDS = 1.0
"""How much later than planned a turn is if the process was stopped, and not only short of processor time."""
TURN_SECONDS = 5.0
"""How long a thread sleeps at most while it waits for others, since a pause is seen only at a turn."""
_MOST_PAUSES = 1000


class RunningTime:
    """The pauses of one process. All times are in seconds of one monotonic clock, and are passed in. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses: list[tuple[float, float]] = []  # in order, without overlaps

    def turn(self, planned: float, now: float) -> None:
        """A thread that planned to wake at ``planned``, at the latest, does so ``now``."""
        if now - planned > LATE_SECONDS:
            self.leave_out(planned, now)

    def leave_out(self, begin: float, end: float) -> None:
        """The time between does not count."""
        with self._lock:
            apart = [pause for pause in self._pauses if pause[1] < begin or end < pause[0]]
            joined = [pause for pause in self._pauses if pause not in apart]
            begin = min([begin, *(each[0] for each in joined)])
            end = max([end, *(each[1] for each in joined)])
            self._pauses = sorted([*apart, (begin, end)])[-_MOST_PAUSES:]

    def age(self, since: float, now: float) -> float:
        """How long this process has run between the two times, in seconds."""
        with self._lock:
            paused = sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._pauses)
        return now - since - paused


running_time = RunningTime()
"""Of this process."""
