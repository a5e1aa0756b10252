"""Interrupts a function by a signal handler that raises, at a chosen one of all the points where Python runs handlers.

Python runs signal handlers in the main thread, after calls and jumps back. The handler used here has itself run again at the
next such point until the chosen one has come. So a test that tries one point after another tries all of them.
"""

from __future__ import annotations

import _thread
import itertools
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNAL = signal.SIGUSR1


class Interrupted(Exception):
    """What the handler raises."""


def interrupted_at(point: int, work: Callable[[], Any]) -> bool:
    """Call ``work()`` and interrupt it at that point, counted from 0; whether it has so many. For the main thread."""
    passed, over = itertools.count(), False

    def handler(number: int, frame: FrameType | None) -> None:
        if over:
            return
        if next(passed) == point:
            raise Interrupted
        # The signal comes again, and no handler runs before this one has returned: unpacking is not a call of Python's.
        (_,) = map(_thread.interrupt_main, (number,))

    before = signal.signal(SIGNAL, handler)
    try:
        _thread.interrupt_main(SIGNAL)
        work()
    except Interrupted:
        return True
    finally:
        over = True
        signal.signal(SIGNAL, before)
    return False


def every_point(work: Callable[[int], Any]) -> Iterator[int]:
    """Interrupt ``work(point)`` at one point after another, until it has no more. Yields after each interruption."""
    for point in itertools.count():
        if not interrupted_at(point, lambda point=point: work(point)):
            return
        yield point
