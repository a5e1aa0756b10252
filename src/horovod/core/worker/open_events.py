"""The collectives that a worker thread has queued on a device and that are not complete: it holds their memory, polls them, and
gives up after a limit.

A device engine's collective returns before the device has carried it out, and handles complete then. Their vectors are held
here until the event is complete. The worker thread polls the oldest event, so an error of the engine, or a peer that never
arrives, ends the job instead of leaving the device waiting forever.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from horovod._base.config import NCCL_TIMEOUT
from horovod.comm.base import CompletionEvent, DeviceFailure

FIRST_LOOK_MILLISECONDS = 1.0
LOOK_MILLISECONDS = 100.0
"""The longest sleep of the worker thread while an event is open. The sleep doubles each time that no event is complete. So
memory is held not much longer than the device needs it, and a long computation of the device costs little."""


class _Open(NamedTuple):
    event: CompletionEvent
    names: str
    held: object


class OpenEvents:
    """Events in the order of their collectives, in which they also complete.

    Args:
        seconds: how long the oldest may take after the device has begun it. Earlier work of the device, such as the computation
            of a step, may take any time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: deque[_Open] = deque()
        self._progress = 0.0
        self._pause = FIRST_LOOK_MILLISECONDS

    def __len__(self) -> int:
        return len(self._open)

    def add(self, event: CompletionEvent, names: str, held: object, now: float) -> None:
        """Hold ``held`` until ``event`` is over."""
        if not self._open:
            self._progress = now
        self._open.append(_Open(event, names, held))
        self._pause = FIRST_LOOK_MILLISECONDS

    def milliseconds(self) -> float | None:
        """Milliseconds until the next poll; None if nothing is open."""
        return self._pause if self._open else None

    def look(self, now: float) -> None:
        """Release everything that is complete.

        Raises:
            DeviceFailure: the engine reports an error, or there was no progress within the limit.
        """
        self._pause = min(2 * self._pause, LOOK_MILLISECONDS)
        while self._open:
            first = self._open[0]
            error = first.event.error()
            if error is not None:
                raise DeviceFailure(f"{first.names} failed on the device: {error}")
            if not first.event.query():
                if not first.event.begun():
                    self._progress = now
                break
            self._open.popleft()
            self._progress = now
            self._pause = FIRST_LOOK_MILLISECONDS
        if self._open and now - self._progress > self._seconds:
            raise DeviceFailure(
                f"{self._open[0].names} has not completed on the device {now - self._progress:.3g} seconds after it began "
                f"there: the device of another rank has not begun it. If that device is still computing, raise {NCCL_TIMEOUT}",
                timed_out=True,
            )
