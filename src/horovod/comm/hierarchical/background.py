"""A thread that makes calls one after another, so that data travels between hosts while the ranks of a host work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

END_SECONDS = 10.0
"""How long :meth:`Background.close` waits for a call that has been aborted."""


class Background:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="horovod-between-hosts", daemon=True)
        self._thread.start()
        self._latest: Future[object] | None = None

    def submit(self, call: Callable[[], object]) -> Future[object]:
        """Queue ``call``. The future gets its result or its exception."""
        made = self._latest = Future[object]()
        self._calls.put((call, made))
        return made

    def idle(self) -> bool:
        """Whether no call is queued or running."""
        return self._latest is None or self._latest.done()

    def _run(self) -> None:
        with np.errstate(all="ignore"):  # as on the worker thread: the script handles an overflow in a gradient
            while (following := self._calls.get()) is not None:
                call, made = following
                try:
                    made.set_result(call())
                except BaseException as error:  # the worker thread raises it when it waits for the result
                    made.set_exception(error)

    def close(self) -> None:
        """End the thread. No call may be submitted afterwards."""
        self._calls.put(None)
        self._thread.join(END_SECONDS)
