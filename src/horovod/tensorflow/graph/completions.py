"""The thread that puts the tickets of completed collectives into TensorFlow's queues.

Worker threads must not run TensorFlow's code, which may block, so they hand tickets to this thread. It runs from the first
collective in a graph until ``shutdown()``. The queues are unbounded, so it never blocks.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from typing import Any

import tensorflow as tf

_log = logging.getLogger("horovod.tensorflow")

_END_SECONDS = 10.0

_waiting: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def start() -> None:
    """Start the thread, unless it already runs."""
    global _thread
    if _thread is None:
        with _lock:
            if _thread is None:
                _thread = threading.Thread(target=_run, name="horovod-tensorflow-completions", daemon=True)
                _thread.start()


def complete(handle: Any, ticket: int) -> None:
    """Have the thread put ``ticket`` into the queue with this handle. Any thread may call it; it returns at once."""
    _waiting.put((handle, ticket))


def stop() -> None:
    """Put the remaining tickets into their queues, and end the thread. Logs a warning if it does not end in time."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
        if thread is not None:
            _waiting.put(None)
            thread.join(_END_SECONDS)
            if thread.is_alive():
                _log.warning(
                    "the thread that completes collectives in graphs did not end within %g seconds", _END_SECONDS
                )


def _run() -> None:
    while True:
        completion = _waiting.get()
        if completion is None:
            return
        handle, ticket = completion
        try:
            tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tf.constant(ticket, tf.int64)])
        except Exception as error:  # the graph, and its queue, no longer exist
            _log.debug("could not put ticket %d into its queue: %s", ticket, error)


def _after_fork() -> None:
    global _lock, _thread, _waiting
    _lock, _thread, _waiting = threading.Lock(), None, queue.SimpleQueue()


os.register_at_fork(after_in_child=_after_fork)
# Exit handlers run in reverse order. init() registers the end of the runtime after this module has registered stop(), so all
# collectives are complete when stop() runs.
atexit.register(stop)
