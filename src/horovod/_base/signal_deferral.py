"""Defers signal handlers while a function runs that an exception must not interrupt halfway.

Python runs signal handlers in the main thread, between any two instructions, and an exception that they raise
(KeyboardInterrupt, a time-out) surfaces there. A collective of some milliseconds shares its state with other threads and other
ranks, and a launcher must not lose track of a process that it has started. So handlers wait until such work is done.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module makes enumerations of numbers, at ten times the cost
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_NEVER = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}
_NUMBERS = tuple(
    int(getattr(signal, name)) for name in sorted({each.name for each in signal.Signals} - _NEVER) if "RT" not in name
)


_kept: tuple[list[Any], dict[int, Any]] = [], {}
"""The handlers of all signals as of the last look, and by signal those that are Python functions."""


def _handlers() -> dict[int, Any]:
    global _kept
    found = list(map(_signal.getsignal, _NUMBERS))
    seen, callables = _kept
    if found != seen:
        callables = {number: handler for number, handler in zip(_NUMBERS, found, strict=True) if callable(handler)}
        _kept = found, callables  # in one step: a handler may run, and raise, between any two
    return callables


_under_way: list[_Deferral] = []
"""The active deferrals of the main thread, the innermost last."""


class _Deferral:
    """Replaces the signal handlers, notes the signals that arrive, and delivers them at the end."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._over = False
        self._noticed: Callable[[int], object] | None = None

    def begin(self) -> None:
        _under_way.append(self)
        for number, handler in _handlers().items():
            self._handlers[number] = handler
            try:
                _signal.signal(number, self._note)
            except ValueError:
                return  # Python is embedded, and no handler runs in this thread

    def _note(self, number: int, frame: Any) -> None:
        if self._over:  # the handler could not be restored
            self._handlers[number](number, frame)
        else:
            self._came.append(number)
            if self._noticed is not None:
                self._noticed(number)

    def notice_by(self, noticed: Callable[[int], object]) -> None:
        """Call ``noticed`` with the number of each signal that has arrived or arrives later. It must not raise."""
        self._noticed = noticed
        for number in tuple(self._came):
            noticed(number)

    def end(self) -> None:
        try:
            self._restore()
        finally:
            self._over = True
            if self in _under_way:
                _under_way.remove(self)
            if self._came:
                self._deliver()

    def end_in_child(self) -> None:
        """In a forked child: restore the handlers, and forget the signals of the parent."""
        self._came.clear()
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:
                _signal.signal(number, handler)

    def _deliver(self) -> None:
        try:
            while self._came:
                signal.raise_signal(self._came.pop(0))
        finally:
            if self._came:
                self._deliver()


def with_signals_deferred(work: Callable[..., _T], *arguments: Any) -> _T:
    """Call ``work(*arguments)``. Signal handlers that were set from Python run right after it."""
    if threading.current_thread() is not threading.main_thread():
        return work(*arguments)  # handlers run in the main thread
    deferral = _Deferral()
    try:
        deferral.begin()
        return work(*arguments)
    finally:
        deferral.end()


def with_signals_noticed(noticed: Callable[[int], object], work: Callable[..., _T], *arguments: Any) -> _T:
    """The same for work that waits: ``noticed(number)`` is called when a signal arrives, and can make the work end early.

    The descriptor of ``signal.set_wakeup_fd`` gets a signal's number only when its handler runs.
    """
    result: _T = with_signals_deferred(_noticing, noticed, work, *arguments)
    return result


def _noticing(noticed: Callable[[int], object], work: Callable[..., _T], *arguments: Any) -> _T:
    if threading.current_thread() is not threading.main_thread():
        return work(*arguments)
    before = signal.set_wakeup_fd(-1)
    try:
        _under_way[-1].notice_by(noticed)
        return work(*arguments)
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _after_fork() -> None:
    """A child that another thread forks meanwhile has no thread that would end the deferral."""
    while _under_way:
        _under_way.pop().end_in_child()


os.register_at_fork(after_in_child=_after_fork)
