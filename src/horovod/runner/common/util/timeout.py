"""The error of a wait that took too long."""

from __future__ import annotations


class TimeoutException(TimeoutError):
    """A dispatcher or worker did not register in time; the message says which, and what to do."""
