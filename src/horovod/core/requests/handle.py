"""The handle of one collective: ``submit`` returns it and ``synchronize`` waits for it."""

from __future__ import annotations

import _thread
import copy
import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Protocol

import msgspec

from horovod.comm.base import CompletionEvent
from horovod.comm.tuned import TunedSettings
from horovod.core.errors import HorovodInternalError
from horovod.observe.flight_recorder import Record

_log = logging.getLogger("horovod.core")


End = Callable[[BaseException | None], BaseException | None]
"""What :class:`Handle` calls just before its completion."""


class Driver(Protocol):
    """The worker, as seen by a thread that waits for a quick collective."""

    def drive(self, handle: Handle) -> None:
        """Carry the collective out on the calling thread, or return before it is done."""

    def take_over(self, handle: Handle) -> None:
        """Make the worker thread carry the collective out at once, because no other thread will."""


_first = threading.RLock()
"""Guards the list of callbacks of every handle while it is made; most handles need none. Reentrant for signal handlers."""


class Handle(msgspec.Struct, eq=False, gc=False):
    """One collective on this rank. A worker thread or an abort completes it exactly once. Any number of threads may wait.

    The garbage collector does not track it. It is part of a cycle only while a thread waits, and completion ends that.

    Attributes:
        error: the reason why the collective failed, once it is done.
        result: results other than tensors, for example received splits.
        event: set before completion if a device carries the collective out. A stream that uses the outputs must wait for it.
            None: the outputs are complete.
        driver: the worker that a waiting thread may drive to carry out this collective; None if it may not.
        tuned: the settings when it was carried out, the same on all ranks; None without autotuning.
        joined: whether some ranks had joined when it was carried out; the same on all others.
        record: its record in the flight recorder.
        end: called just before completion, with the error. It returns the error that waiting threads get. An exception that it
            raises is the error, too.
    """

    end: End | None = None
    driver: Driver | None = None
    error: BaseException | None = None
    result: Any = None
    event: CompletionEvent | None = None
    record: Record | None = None
    tuned: TunedSettings | None = None
    joined: bool = False
    _finished: bool = False
    _next: list[Callable[[], None]] | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._finished else "done" if self.error is None else f"failed: {self.error}"
        return f"Handle({state})"

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._finished

    def awaited(self) -> bool:
        """Whether a thread waits for it or has asked to be called."""
        return bool(self._next)

    def complete(self, error: BaseException | None = None, now: float = 0.0) -> None:
        """Complete the handle and wake all threads that wait. Called once.

        Args:
            now: the time (``time.monotonic``), if the caller has just looked at the clock.
        """
        if self.end is not None:
            error = self._process(error)
        self.error = error
        record = self.record
        if record is not None:
            record.ended = now or monotonic()  # not by a method: each call costs
            if error is not None:
                record.fail(error)
        self._finished = True
        self.driver = None
        if self._next:
            self._call_next(self._next)

    def _process(self, error: BaseException | None) -> BaseException | None:
        """Call ``end``, once. Returns the error of the handle."""
        end, self.end = self.end, None
        assert end is not None
        try:
            return end(error)
        except Exception as failure:
            _log.exception("processing the result of a collective failed")
            text = f"the collective is complete, but processing its result failed: {failure!r}"
            return error or HorovodInternalError(text)

    def then(self, callback: Callable[[], None], hurried: bool = True) -> None:
        """Call ``callback`` once when the collective is done, on the thread that completes it; at once if it is done.

        For bindings whose framework waits by itself. The callback must not block. An exception that it raises is logged.

        Args:
            hurried: whether the caller needs the result, so that the worker thread carries the collective out at once.
        """
        if self._next is None:
            with _first:
                self._next = self._next or []
        self._next.append(callback)
        if self._finished:
            self._call_next(self._next)
        elif hurried:
            self.leave_to_worker()

    def leave_to_worker(self) -> None:
        """Make the worker thread carry it out at once: the caller needs the result but does not wait for it here."""
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.take_over(self)

    def _call_next(self, callbacks: list[Callable[[], None]]) -> None:
        while True:
            try:
                callback = callbacks.pop()  # two threads may be here at the same time; each callback is popped by one
            except IndexError:
                return
            try:
                callback()
            except Exception:  # it must not keep the thread from other callbacks
                _log.exception("a callback at the end of a collective failed")

    def wait(self, timeout: float = -1, final: bool = False) -> None:
        """Return when the collective is done; Ctrl-C interrupts.

        Args:
            timeout: the longest time in seconds; -1: only the runtime's own limits hold.
            final: nothing is to be done when the time is over: it is the limit of a job that hangs.

        Raises:
            the collective's error: each time a new exception of its type, with its message.
            TimeoutError: the collective was not complete within ``timeout`` seconds (-1: only the runtime's own limits hold).
        """
        record = self.record
        if record is not None:
            record.awaited = record.ended or monotonic()
        if self.driver is not None and (final or timeout < 0):
            self.attempt()
        if not self._finished:
            self._sleep(timeout, final or timeout < 0)
        if self.error is not None:
            raise copy.copy(self.error)  # each waiting thread gets its own

    def attempt(self) -> None:
        """Carry the collective out on this thread, which waits for it; or return before it is done, after some milliseconds at
        most if other ranks are late. Raises what a signal handler raises."""
        driver = self.driver
        if driver is None:
            return
        try:
            driver.drive(self)
        except BaseException:  # of a signal handler, perhaps before anything was announced
            self.leave_to_worker()
            raise

    def _sleep(self, timeout: float, for_good: bool) -> None:
        gate = _thread.allocate_lock()
        gate.acquire()
        self.then(gate.release)
        thread = _thread.get_ident()
        if for_good:
            waiting[thread] = self, monotonic()
        try:
            if not gate.acquire(timeout=timeout):
                raise TimeoutError(f"the collective was not complete within {timeout:g} seconds")
        finally:
            waiting.pop(thread, None)


waiting: dict[int, tuple[Handle, float]] = {}
"""By thread that sleeps in :meth:`Handle.wait` until the job ends, if need be, the handle that it waits for, and since when."""


def all_of(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all collectives, also after one has failed, so that no tensor is written any more. Then raise the first error.

    Args:
        waits: for each collective a function that returns when it is done and raises if it failed, such as :meth:`Handle.wait`.
    """
    error: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as failure:
            error = error or failure
    if error is not None:
        raise error
