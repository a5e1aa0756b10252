"""Warns about a collective that only some ranks call, before they wait for the others. For debugging."""

from __future__ import annotations

import logging
import sys
from types import FrameType

from horovod.core.negotiation.messages import Request
from horovod.observe.call_site import is_users
from horovod.observe.rank_conditions import condition_at

_log = logging.getLogger("horovod.core")
_MOST = 4096
"""The number of call sites to remember."""


class ConditionalCalls:
    """The call sites at which this rank has submitted something.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: set[tuple[str, int]] = set()

    def look(self, request: Request) -> None:
        """Examine the lines that have led to a submission, on the thread that submits. Each line is examined once."""
        file, _, line = request.caller.rpartition(":")
        if line.isdecimal():
            self._look_at(file, int(line), request)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                self._look_at(frame.f_code.co_filename, frame.f_lineno, request)
            frame = frame.f_back

    def _look_at(self, file: str, line: int, request: Request) -> None:
        if (file, line) in self._seen or len(self._seen) >= _MOST:
            return
        self._seen.add((file, line))
        found = condition_at(file, line)
        if found is not None:
            _log.warning(
                "rank %d submits %r at %s, and %s:%d is inside `if %s` (line %d). All ranks must call a collective: "
                "this rank waits for ranks on which the condition is false. Move the call out of the condition.",
                self._rank,
                request.name,
                request.caller,
                file,
                line,
                found.text,
                found.line,
            )
