"""Which thread drives the worker: its own thread, or a thread of the script that waits for a quick collective.

Waking another thread, and being woken by it, takes longer than a small collective. So a thread that waits for one drives the
worker itself: it announces, receives the order and runs the collective. It leaves everything else to the worker thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import numpy as np

from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import Batch
from horovod.core.requests.handle import Handle
from horovod.core.worker.connections import NOTHING, Connections, ReadyConnections
from horovod.core.worker.waiting import SLEEP_SECONDS, SLEEPS, STANDBY_MILLISECONDS, Patience, Polls

SLOW = frozenset({Operation.JOIN, Operation.ADASUM})
QUICK_BYTES = 32 << 20
"""The largest contribution of this rank to a quick collective. Signals are deferred as long as it takes: on one host some
milliseconds, over 1 Gbit/s half a second. Results that this thread allocates are in memory that the C library has kept: a
worker thread's are in new pages each time, and an alltoall of 16 MB takes twice as long."""


def may_drive(batch: Batch) -> bool:
    """Whether a waiting thread may run this batch: the batch fails, or each request is quick and was submitted here."""
    return bool(batch[0][0].error) or all(entry is not None and entry.handle.driver is not None for _, entry in batch)


class DrivingThreads:
    """Lets one thread at a time drive the worker.

    Args:
        connections: of the worker.
        polls: how often a driving thread polls before it sleeps.
        hears_others: the worker is a coordinator's or a relay's. It receives messages before its first step; others announce
            first.
    """

    def __init__(self, connections: Connections, polls: Polls, hears_others: bool) -> None:
        self._connections = connections
        self._patience = Patience(polls.driver)
        self._hears_others = hears_others
        self._lock = threading.Lock()
        self._open = True
        self._failure: Exception | None = None
        self._driven = self._seen = 0

    def drive(
        self,
        handle: Handle,
        try_fast_path: Callable[[Handle], bool] | None,
        step: Callable[[ReadyConnections], bool],
    ) -> None:
        """Drive the worker on the calling thread until ``handle`` is done, or until only the worker thread can continue.

        The worker thread is woken for everything that this thread leaves undone. Signal handlers must be deferred
        (:mod:`horovod._base.signal_deferral`).

        Args:
            try_fast_path: carries the collective out by the fast path, and returns whether it has; None if there is none.
            step: does everything that is quick, and returns whether anything is left for the worker thread.
        """
        if not self._lock.acquire(blocking=False):
            self._connections.wake()  # the driving thread may not have seen the submission
            return
        finished = False
        try:
            if not self._open:
                return  # the worker has failed; that will fail the handle, too
            self._driven += 1
            with np.errstate(all="ignore"):
                finished = (try_fast_path is not None and try_fast_path(handle)) or self._until_done(handle, step)
        except Exception as error:
            self._failure, self._open = error, False
        except BaseException as error:  # another thread has raised it in this one: signal handlers are deferred
            self._failure = RuntimeError(f"{error!r} interrupted a thread that was inside a collective")
            self._open = False
            raise
        finally:
            if not finished:
                self._seen = self._driven  # so the worker thread does not enter STANDBY
            self._lock.release()
            if not finished:
                self._connections.wake()

    def _until_done(self, handle: Handle, step: Callable[[ReadyConnections], bool]) -> bool:
        """Whether the handle is done, and nothing is left that only the worker thread does."""
        ready = self._connections.poll_messages(0) if self._hears_others else NOTHING
        patience, began = self._patience, 0.0
        polls = patience.polls
        for poll in range(polls + SLEEPS):
            if step(ready):
                return False
            if handle.done():
                if began:
                    patience.slept(monotonic() - began)
                elif poll:
                    patience.answered()
                return True
            if poll == polls:
                began = monotonic()
            ready = self._connections.poll_messages(0 if poll < polls else SLEEP_SECONDS * 1000)
        patience.slept(monotonic() - began)
        return not step(ready) and handle.done()

    # For the worker thread.

    def take(self, ready: ReadyConnections, step: Callable[[ReadyConnections], None]) -> None:
        """Take one step. Also raises what a step raised on another thread.

        While another thread drives, messages are left to that thread; a wake-up is not.
        """
        if not self._lock.acquire(blocking=ready.woken or self._driven == self._seen):
            return
        try:
            if self._failure is not None:
                raise self._failure
            step(ready)
        except BaseException:
            self._open = False  # a failed step leaves a state that no thread may continue from
            raise
        finally:
            self._lock.release()

    def driven(self) -> bool:
        """Whether another thread has driven the worker since the last call."""
        before, self._seen = self._seen, self._driven
        return before != self._seen

    def sleep_limit(self, milliseconds: Callable[[], float | None]) -> float | None:
        """``milliseconds()``; a short time while another thread drives, because a step changes what there is to wait for."""
        if not self._lock.acquire(blocking=False):
            return STANDBY_MILLISECONDS
        try:
            return milliseconds()
        finally:
            self._lock.release()

    def end(self) -> None:
        """Wait until no other thread drives, and let none begin. The worker thread's last call."""
        self._open = False
        self._lock.acquire()
