"""Signals to the launcher as readable bytes, so that its one loop can wait for them beside everything else."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

_SAME_SIGNAL_SECONDS = 0.3
"""A wrapper that forwards Ctrl-C beside the terminal's own must not count as a second, impatient one."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Insisted(BaseException):
    """A second signal came while the first was being obeyed: end at once, without any courtesy."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SignalPipe:
    """While active, signals that ask the launcher to end arrive at :meth:`fileno`; a second one raises ``Insisted``.

    A signal that was ignored when the launcher started (``nohup``, a background job) stays ignored. Main thread only.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._first_at = 0.0
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> SignalPipe:
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
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
        """The ending signals that arrived since the last call."""
        try:
            return [number for number in os.read(self._reader, 512) if number in ENDING_SIGNALS]
        except BlockingIOError:
            return []

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._first_at:
            self._first_at = now
        elif now - self._first_at > _SAME_SIGNAL_SECONDS:
            raise Insisted(number)
