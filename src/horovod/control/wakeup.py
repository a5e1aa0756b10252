"""A descriptor by which any thread wakes the one that polls it: a pipe that holds a byte while somebody wants attention."""

from __future__ import annotations

import os
import threading


class WakeUp:
    """To be registered with ``poll``, like a socket; readable from :meth:`set` until :meth:`clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        # A number that was closed soon belongs to a file of the script, which must get no byte from here. The lock can be
        # taken again by its thread: a signal's handler may come here while the code that it interrupts is here.
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
                pass  # nobody has looked for a long time, and finds enough

    def clear(self) -> None:
        """What was set is noticed. For the thread that polls."""
        os.read(self._reader, 4096)

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return [self._reader, self._writer]

    def close(self) -> None:
        """Nobody polls it any more."""
        with self._lock:
            reader, writer = self._reader, self._writer
            self._reader = self._writer = -1
        if reader >= 0:
            os.close(reader)
            os.close(writer)
