"""The promise of a result: what ``submit`` returns and ``synchronize`` waits for."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from horovod.comm.base import Event
from horovod.core.errors import HorovodInternalError

_log = logging.getLogger("horovod.core")


class Driver(Protocol):
    """A worker thread, as what waits for a quick collective knows it."""

    def drive(self, handle: Handle) -> None:
        """Do what is left to do for it on the calling thread, or return before."""

    def expedite(self, handle: Handle) -> None:
        """Have the worker thread do it without delay, for no other thread will."""


def drive_plainly(driver: Driver, handle: Handle) -> None:
    """The call that :func:`drive_by` replaces."""
    driver.drive(handle)


_drive: Callable[[Driver, Handle], None] = drive_plainly


def drive_by(drive: Callable[[Driver, Handle], None]) -> None:
    """Have ``drive(driver, handle)`` called in place of ``driver.drive(handle)``, which it calls itself.

    For a framework that watches what Python code runs on a thread, and must not watch that.
    """
    global _drive
    _drive = drive


_first = threading.RLock()
"""Held by who is the first to wait for a handle; a signal's handler may be, while the thread that it interrupts is. Most
handles are done before anybody waits."""


class Handle(msgspec.Struct, eq=False, gc=False):
    """Completed exactly once, by a worker thread or by an abort; awaited by any number of threads.

    The garbage collector does not know it: what it is part of, a circle of its waiters, ends with its completion.

    Attributes:
        error: why the collective failed, once done.
        result: what the operation produces beyond the tensors it fills, for example received splits.
        event: set before it is completed, where a device carries the collective out: whoever uses the outputs lets its stream
            wait for it. None: the outputs are there.
        driver: of a quick collective that the thread that waits for it may carry out; None if only a worker thread may.
        end: called by whoever completes it, just before, with the error; returns the error that waiters get. What it raises,
            waiters get.
    """

    end: Callable[[BaseException | None], BaseException | None] | None = None
    driver: Driver | None = None
    error: BaseException | None = None
    result: Any = None
    event: Event | None = None
    _finished: bool = False
    _next: list[Callable[[], None]] | None = None

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._finished

    def awaited(self) -> bool:
        """Whether it is not done, and somebody waits or asked to be called."""
        return bool(self._next)

    def complete(self, error: BaseException | None = None) -> None:
        """Called once. Wakes whoever waits."""
        end, self.end = self.end, None
        if end is not None:
            try:
                error = end(error)
            except Exception as failure:
                error = error or HorovodInternalError(f"what follows a collective failed: {failure!r}")
                _log.exception("what follows a collective failed")
        self.error = error
        self._finished = True
        self.driver = None
        if self._next:
            self._call_next(self._next)

    def then(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the collective is done: on the thread that completes it, or at once if it is.

        For bindings whose framework waits by itself. The callback must not block; what it raises is logged.
        """
        if self._next is None:
            with _first:
                self._next = self._next or []
        self._next.append(callback)
        if self._finished:
            self._call_next(self._next)
        else:
            self.expedite()

    def expedite(self) -> None:
        """Somebody wants the result who does not wait here, so leave it to the worker thread, without delay."""
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.expedite(self)

    def _call_next(self, callbacks: list[Callable[[], None]]) -> None:
        while True:
            try:
                callback = callbacks.pop()  # of two threads that come here at the same time, one finds it
            except IndexError:
                return
            try:
                callback()
            except Exception:  # other callbacks, and the worker thread whose thread this is, have nothing to do with it
                _log.exception("a callback at the end of a collective failed")

    def wait(self, timeout: float = -1) -> None:
        """Return when the collective is done; Ctrl-C interrupts.

        Raises:
            the collective's error, as a new exception of its type with the same message, each time it is asked for.
            TimeoutError: it was not done within ``timeout`` seconds (-1: the runtime's own bounds decide).
        """
        driver = self.driver
        if driver is not None and timeout < 0:
            _drive(driver, self)
        if not self._finished:
            gate = _thread.allocate_lock()
            gate.acquire()
            self.then(gate.release)
            if not gate.acquire(timeout=timeout):
                raise TimeoutError(f"the collective was not done within {timeout:g} seconds")
        if self.error is not None:
            raise type(self.error)(*self.error.args)


def all_of(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for everything that is under way, even after a failure, so that nothing is written any more; then raise the first.

    Args:
        waits: of each, what returns when it is done and raises if it failed, such as :meth:`Handle.wait`.
    """
    error: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as failure:
            error = error or failure
    if error is not None:
        raise error
