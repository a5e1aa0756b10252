"""The error of a wait that took too long."""

from __future__ import annotations


class TimeoutException(TimeoutError):
    """Somebody did not come in time; the text says who, and what to do."""
