"""A time limit, and the error of a wait that took too long."""

from __future__ import annotations

import time


class TimeoutException(TimeoutError):
    """A wait took too long; the message says what it waited for, and what to do."""


class Timeout:
    """A time limit that begins now.

    Args:
        timeout: the limit in seconds.
        message: the text of the error; ``{activity}`` in it is replaced by the activity that took too long.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left; 0 if none are."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException if the time is over."""
        if self.timed_out():
            raise TimeoutException(self.text(activity))

    def text(self, activity: str) -> str:
        """The text of the error."""
        return f"{self._message.format(activity=activity)} Timeout after {self._timeout} seconds."
