"""Finds the uncaught exception that ends this process. The other ranks get its text and its line."""

from __future__ import annotations

import sys

from horovod.core.errors import HorovodInternalError
from horovod.observe import call_site

_seen_before: BaseException | None = None


def forget() -> None:
    """Called by ``init()``: an exception that was raised before, at a prompt or in a notebook, does not end this process."""
    global _seen_before
    _seen_before = _last()


def unhandled() -> str:
    """The uncaught exception that ends this process, as text; "" if there is none."""
    error = _last()
    if error is None or error is _seen_before or isinstance(error, HorovodInternalError):
        return ""
    line = call_site.raised_at(error)
    text = f": {error}" if str(error) else ""
    return f"it raised {type(error).__name__}{text}" + (f" (at {line})" if line else "")


def failed_collective() -> HorovodInternalError | None:
    """The uncaught error of a collective that ends this process; None if there is none."""
    error = _last()
    return error if isinstance(error, HorovodInternalError) and error is not _seen_before else None


def _last() -> BaseException | None:
    error = getattr(sys, "last_exc", None) or getattr(
        sys, "last_value", None
    )  # the interpreter's, since 3.12 and before
    return error if isinstance(error, BaseException) else None
