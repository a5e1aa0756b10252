"""A descriptor with which any thread wakes the thread that polls it: a pipe that holds a byte until it is cleared."""

from __future__ import annotations

import os
import threading


class WakeUp:
    """Can be registered with ``poll`` like a socket; readable from :meth:`set` until :meth:`clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        # The lock keeps set() from writing to a descriptor that close() has closed: its number may be a file of the script by
        # then. It is reentrant, because a signal handler may call set() while the interrupted code is inside set().
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        """Wake the thread that polls. Any thread, at any time; does nothing after :meth:`close`."""
        with self._lock:
            try:
                if self._writer >= 0:
                    os.write(self._writer, b"x")
            except BlockingIOError:
                pass  # the pipe is full, so it is readable

    def clear(self) -> None:
        """Make it unreadable, if another thread that polls has not done so."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            pass

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [self._reader, self._writer]

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            reader, writer = self._reader, self._writer
            self._reader = self._writer = -1
        if reader >= 0:
            os.close(reader)
            os.close(writer)
