"""Finds the error that ends this process, an uncaught exception or a status other than 0, for the other ranks.

An interpreter that ends waits first for threads of the script, and for its atexit functions, which may take forever. So the
error is reported before that (:func:`watch`). No hook of the interpreter is replaced before the script's main thread has
ended, so hooks that the script installs run as they would without Horovod.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  what is registered before ours is called after it: it waits for its threads
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from horovod.core.errors import HorovodInternalError
from horovod.observe import call_site

_seen_before: BaseException | None = None
_ending = ""
"""The error that ends this process, if it is not an exception of the main thread."""


def forget() -> None:
    """Called by ``init()``: an exception that was raised before, at a prompt or in a notebook, does not end this process."""
    global _seen_before
    if threading.main_thread().is_alive():
        _seen_before = _last()


def watch(tell: Callable[[str], None]) -> None:
    """Call ``tell`` with the error that ends this process as soon as the main thread has ended by it, or a thread for which the
    interpreter waits then. Called once, on the main thread or any other."""
    sys.exit = _raise_exit

    def main_thread_ended() -> None:
        if reason := unhandled():
            tell(reason)
        before = threading.excepthook

        def thread_raised(arguments: Any) -> None:
            global _ending
            before(arguments)
            thread = arguments.thread
            if thread is not None and not thread.daemon and not isinstance(arguments.exc_value, HorovodInternalError):
                _ending = _ending or f"{_text(arguments.exc_value)} in thread {thread.name}"
                tell(_ending)

        threading.excepthook = thread_raised

    # The interpreter calls it when the main thread has ended, before it waits for other threads.
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(main_thread_ended)


def unhandled() -> str:
    """The error that ends this process, as text; "" if there is none."""
    error = _last()
    if error is None or error is _seen_before or isinstance(error, HorovodInternalError):
        return _ending
    return _text(error)


def ending() -> str:
    """Why this process ends, as text: the error, or the end of its script; "" if it does not end. A process that ends can take
    part in no further round: its interpreter starts no more threads.
    """
    return unhandled() or ("" if threading.main_thread().is_alive() else "its script has ended")


def failed_collective() -> HorovodInternalError | None:
    """The uncaught error of a collective that ends this process; None if there is none."""
    error = _last()
    return error if isinstance(error, HorovodInternalError) and error is not _seen_before else None


class ExitWithStatus(SystemExit):
    """What ``sys.exit`` raises. It notes when the interpreter itself asks for the status: then the script has not caught it."""

    line = ""

    @property
    def code(self) -> Any:  # type: ignore[override]  # an attribute of the base class
        global _ending
        code = super().code
        try:
            sys._getframe(1)
        except ValueError:  # no Python code has called this
            if code not in (None, 0):
                _ending = f"it ended with status {code if isinstance(code, int) else 1} (sys.exit at {self.line})"
        return code


def _raise_exit(status: Any = None, /) -> NoReturn:
    end = ExitWithStatus(status)
    end.line = call_site.caller()
    raise end


def _text(error: BaseException) -> str:
    line = call_site.raised_at(error)
    text = f": {error}" if str(error) else ""
    return f"it raised {type(error).__name__}{text}" + (f" (at {line})" if line else "")


def _last() -> BaseException | None:
    error = getattr(sys, "last_exc", None) or getattr(
        sys, "last_value", None
    )  # the interpreter's, since 3.12 and before
    return error if isinstance(error, BaseException) else None
