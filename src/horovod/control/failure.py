"""The kind and the details of the failure that ends a job. They are sent to all ranks with the rank and the reason."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class FailureKind(IntEnum):
    """How a rank has failed."""

    LOST = 0
    """Its process ended, was stopped, or cannot be reached."""
    RAISED = 1
    """Its script raised an exception."""
    TIME_LIMIT = 2
    """It runs, but has not answered, or made no progress, within a time limit."""
    ENGINE = 3
    """An engine, a device or the runtime failed there."""


class Cause(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a failure besides the rank and the reason.

    Attributes:
        tensor: the name of the collective that the ranks waited for; "" if no collective failed.
        call_sites: by global rank, the line of the script at which the rank is or was.
    """

    kind: FailureKind = FailureKind.LOST
    tensor: str = ""
    call_sites: dict[int, str] = {}


LOST = Cause()
RAISED = Cause(FailureKind.RAISED)
TIME_LIMIT = Cause(FailureKind.TIME_LIMIT)
ENGINE = Cause(FailureKind.ENGINE)
