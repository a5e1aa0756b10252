"""The promise of a result: what ``submit`` returns and ``synchronize`` waits for."""

from __future__ import annotations

import _thread
from typing import Any


class Handle:
    """Completed exactly once, by a lane or by an abort; awaited by any number of threads.

    Attributes:
        error: why the collective failed, once done.
        result: what the operation produces beyond the tensors it fills, for example received splits.
    """

    __slots__ = ("_finished", "_gate", "error", "result")

    def __init__(self) -> None:
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._finished = False
        self.error: BaseException | None = None
        self.result: Any = None

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._finished

    def complete(self, error: BaseException | None = None) -> None:
        """Called once. Wakes whoever waits."""
        self.error = error
        self._finished = True
        self._gate.release()

    def wait(self, timeout: float = -1) -> None:
        """Return when the collective is done; Ctrl-C interrupts.

        Raises:
            the collective's error, as a new exception of its type with the same message, each time it is asked for.
            TimeoutError: it was not done within ``timeout`` seconds (-1: the runtime's own bounds decide).
        """
        if not self._finished:
            if not self._gate.acquire(timeout=timeout):
                raise TimeoutError(f"the collective was not done within {timeout:g} seconds")
            self._gate.release()
        if self.error is not None:
            raise type(self.error)(*self.error.args)
