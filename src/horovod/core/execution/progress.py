"""Who takes a worker thread's turns, one thread at a time: its own thread, or one that waits for a quick collective.

To wake another thread, and to be woken by it, takes longer than a small collective does, and as long as one of a megabyte. So
who waits for one carries it out, and leaves the rest to the worker thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from horovod.core.coordination.messages import Operation
from horovod.core.execution.batch import Batch, Entry
from horovod.core.execution.connections import NOTHING, Connections, ReadyConnections
from horovod.core.execution.signal_deferral import with_signals_deferred
from horovod.core.submission.handle import Handle

SLOW = frozenset({Operation.JOIN, Operation.ADASUM})
QUICK_BYTES = 4 << 20
"""What a thread that waits may do itself: all but these operations, of so many bytes at most on this rank. That takes it some
milliseconds, for which a signal's handler has to wait."""

LOOKS = 100
SLEEPS = 10
"""How long it waits for peers: so many looks (one where ranks share cores), then so many sleeps of a millisecond. Then it
leaves the waiting to the worker thread, and can be interrupted again."""

STANDBY_MILLISECONDS = 5
STANDBYS = 20
"""While other threads take turns, the worker thread listens to its bell for so long at a time, and every so many times looks at
everything else there is to do."""


def is_quick(entry: Entry) -> bool:
    """Whether a thread that waits for this may carry it out itself."""
    return entry.ready is None and entry.size() <= QUICK_BYTES and entry.request.operation not in SLOW


def may_drive(batch: Batch) -> bool:
    """Whether a thread that waits may run this: it fails, or all of it is quick and this rank's own."""
    return bool(batch[0][0].error) or all(entry is not None and entry.handle.driver is not None for _, entry in batch)


class Progress:
    """The turns of one worker thread.

    Args:
        connections: the worker thread's; its bell wakes the worker thread.
        spins: whether every rank has a core, so that one may look instead of sleeping.
        coordinates: whether this is the worker thread that waits for others' announcements; others announce before they look.
    """

    def __init__(self, connections: Connections, spins: bool, coordinates: bool) -> None:
        self._connections = connections
        self._looks = LOOKS if spins else 1
        self._coordinates = coordinates
        self._taken = threading.Lock()
        self._open = True
        self._failure: Exception | None = None
        self._driven = self._seen = 0

    def drive(
        self, handle: Handle, try_fast_path: Callable[[Handle], bool], step: Callable[[ReadyConnections], bool]
    ) -> None:
        """Take turns on the calling thread until ``handle`` is done; return before if that takes long or others must do it.

        Nothing is left undone: what this thread leaves, the worker thread is woken for.

        Args:
            hurry: does it without a turn if it can, and says whether it has.
            turn: does what is quick, and says whether anything is left.
        """
        with_signals_deferred(self._drive, handle, try_fast_path, step)

    def _drive(
        self, handle: Handle, try_fast_path: Callable[[Handle], bool], step: Callable[[ReadyConnections], bool]
    ) -> None:
        if not self._taken.acquire(blocking=False):
            self._connections.ring()  # that turn may not have seen what was submitted
            return
        finished = False
        try:
            if not self._open:
                return  # the worker thread has failed, and the failure will fail the handle
            self._driven += 1
            with np.errstate(all="ignore"):
                finished = try_fast_path(handle) or self._until_done(handle, step)
        except Exception as error:
            self._failure, self._open = error, False
        except BaseException as error:  # only what another thread threw into this one: no signal's handler runs here
            self._failure = RuntimeError(f"{error!r} interrupted a thread that was inside a collective")
            self._open = False
            raise
        finally:
            if not finished:
                self._seen = self._driven  # so that the worker thread does not park
            self._taken.release()
            if not finished:
                self._connections.ring()

    def _until_done(self, handle: Handle, step: Callable[[ReadyConnections], bool]) -> bool:
        """Whether it is done, and nothing is left that only the worker thread does."""
        ready = self._connections.arrivals(0) if self._coordinates else NOTHING
        for look in range(self._looks + SLEEPS):
            if step(ready):
                return False
            if handle.done():
                return True
            ready = self._connections.arrivals(0 if look < self._looks else 1)
        return not step(ready) and handle.done()

    # For the worker thread.

    def take(self, ready: ReadyConnections, step: Callable[[ReadyConnections], None]) -> None:
        """Take one turn. Raises what a turn raised on another thread, too.

        While another thread takes turns, what has arrived is left to it, but not what the bell was rung for.
        """
        if not self._taken.acquire(blocking=ready.rung or self._driven == self._seen):
            return
        try:
            if self._failure is not None:
                raise self._failure
            step(ready)
        except BaseException:
            self._open = False  # what a failure left half done, nobody may go on with
            raise
        finally:
            self._taken.release()

    def driven(self) -> bool:
        """Whether another thread has taken turns since this was asked last."""
        before, self._seen = self._seen, self._driven
        return before != self._seen

    def between(self, milliseconds: Callable[[], float | None]) -> float | None:
        """What ``milliseconds()`` says between two turns; a short while during one, which changes what there is to wait for."""
        if not self._taken.acquire(blocking=False):
            return STANDBY_MILLISECONDS
        try:
            return milliseconds()
        finally:
            self._taken.release()

    def end(self) -> None:
        """Return when no other thread is inside a turn; there are no more. Called by the worker thread, as the last."""
        self._open = False
        self._taken.acquire()
