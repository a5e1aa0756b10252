"""How many calls all ranks have completed, by small collectives among them: for ranks that share no memory.

A vote is an allreduce of the minimum. A rank takes part in the next one when it has completed more calls than all are known to
have. Any other rank then completes these calls too, or is lost, so every vote that one rank begins all of them begin. Calls in
flight share votes: there is one at a time.

A rank has a vote's result only when every rank has contributed to it. So a part of the ranks that is cut off from the others
can complete no vote, even if it knows nothing of the cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.errors import HorovodInternalError
from horovod.core.requests.handle import End, Handle
from horovod.core.requests.tensor import Tensor

Begin = Callable[[Sequence[Tensor], ReduceOp, End], Handle]
"""Begins an allreduce in place among the ranks. Its :data:`End` is called on the thread that carries it out."""


class Votes:
    """One rank's view of the numbers. It has the methods of :class:`~horovod.comm.shm.completed_calls.CompletedCalls`.

    Args:
        begin: begins the allreduce of a vote.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._own = self._agreed = 0
        self._number = 0
        self._running: Handle | None = None
        self._votes = self._failed = False

    def publish(self, number: int) -> None:
        """This rank has completed ``number`` calls; the number never decreases."""
        with self._lock:
            self._own = number
        self._vote()

    def lowest(self) -> int:
        """How many calls all ranks are known to have completed."""
        return self._agreed

    def await_all(self, number: int, seconds: float) -> bool:
        """Wait at most ``seconds`` until all ranks have completed ``number`` calls, and take part in the votes for it on this
        thread; return whether they have. Returns False at once if a vote has failed."""
        running = self._running
        if self._agreed < number and running is not None:
            running.attempt()
            try:
                running.wait(seconds)
            except (HorovodInternalError, TimeoutError):
                pass  # the numbers tell
        return self._agreed >= number

    def is_open(self) -> bool:
        """Whether no vote has failed."""
        return not self._failed

    def _vote(self) -> None:
        """Take part in the next vote, unless one is under way or nothing is to be agreed."""
        with self._lock:
            if self._votes or self._failed or self._own <= self._agreed:
                return
            self._votes = True
            self._number += 1
            number = self._number
            values = np.array([self._own], np.int64)

        def end(error: BaseException | None) -> BaseException | None:
            with self._lock:
                self._votes, self._running = False, None
                self._failed = error is not None
                if error is None:
                    self._agreed = int(values[0])
            self._vote()
            return error

        try:
            running = self._begin([Tensor(values, DataType.INT64, values.shape)], ReduceOp.MIN, end)
        except HorovodInternalError as error:  # the runtime has ended
            end(error)
            return
        with self._lock:
            if self._votes and self._number == number:  # it has not ended meanwhile
                self._running = running
