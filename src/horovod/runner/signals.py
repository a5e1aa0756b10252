"""Signals to the launcher as readable bytes, so that its one loop can wait for them beside everything else."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

_SAME_SIGNAL_SECONDS = 0.3
"""A Ctrl-C that a wrapper forwards in addition to the terminal's must not count as a second one."""
_TWICE_SECONDS = 1.0
"""A second Ctrl-C within this time, after one that was passed on to a rank, ends the job."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAKEN = (*ENDING_SIGNALS, signal.SIGTSTP, signal.SIGURG)


def end_at_signals() -> None:
    """Begin the program: a signal that asks it to end gives it its exit status, unless a job handles it (:class:`SignalPipe`).

    A signal that was ignored stays ignored.
    """
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def ignore_signals() -> None:
    """End the program: its exit status is decided, and no signal changes that.

    A handler would not do: as it ends, the interpreter gives signals their default effect back, unless they are ignored.
    """
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, _: FrameType | None) -> None:
    ignore_signals()
    raise SystemExit(128 + number)


class SecondSignal(BaseException):
    """A second signal came while the job was ending: kill everything at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SignalPipe:
    """While active, signals that ask the launcher to end arrive at :meth:`fileno`; a second one may raise ``SecondSignal``.

    Ctrl-Z arrives there, too, and SIGURG, by which the user has all ranks write their flight recorders. A signal that was
    ignored when the launcher started (``nohup``, a background job) stays ignored. Main thread only.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._first_at = 0.0
        self.ends_at_once = False
        """Whether a signal ends this process at once: the job has not begun."""
        self.may_raise = False
        """Whether a second signal raises ``SecondSignal``. The code that catches it sets this; raising it resets this."""
        self.passes_interrupts_on = False
        """Whether Ctrl-C is for a rank that reads from the terminal, unless two come in quick succession."""
        self._passed_on_at = -_TWICE_SECONDS
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> SignalPipe:
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda *_: None)
        self._before[signal.SIGURG] = signal.signal(signal.SIGURG, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # typeshed has no name for what signal() returns
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    @property
    def pressed(self) -> bool:
        """Whether a signal has asked the launcher to end."""
        return bool(self._first_at)

    def take(self) -> list[int]:
        """The ending signals, SIGTSTP and SIGURG, that arrived since the last call."""
        try:
            return [number for number in os.read(self._reader, 512) if number in _TAKEN]
        except BlockingIOError:
            return []

    @staticmethod
    def suspend() -> None:
        """Stop this process as Ctrl-Z does, and return when it continues."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.ends_at_once:
            raise SystemExit(128 + number)
        now = time.monotonic()
        if self.passes_interrupts_on and number == signal.SIGINT and not self._first_at:
            since = now - self._passed_on_at
            if since >= _TWICE_SECONDS:
                self._passed_on_at = now
            if since >= _TWICE_SECONDS or since <= _SAME_SIGNAL_SECONDS:
                return
        if not self._first_at:
            self._first_at = now
        elif self.may_raise and now - self._first_at > _SAME_SIGNAL_SECONDS:
            self.may_raise = False
            raise SecondSignal(number)
