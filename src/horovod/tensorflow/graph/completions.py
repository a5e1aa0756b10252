"""The thread that tells TensorFlow's queues which collectives are done.

Worker threads must not run TensorFlow's code, which may do anything, so they pass the news on to this thread. It exists
from the first collective in a graph until ``shutdown()``; a queue's enqueue never blocks, for the queues are unbounded.
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
    """Have a thread; harmless if there is one."""
    global _thread
    if _thread is None:
        with _lock:
            if _thread is None:
                _thread = threading.Thread(target=_run, name="horovod-tensorflow-deliveries", daemon=True)
                _thread.start()


def deliver(handle: Any, ticket: int) -> None:
    """Put ``ticket`` into the queue with this handle, soon. Called on any thread; returns at once."""
    _waiting.put((handle, ticket))


def stop() -> None:
    """Deliver what is left, and end the thread."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
        if thread is not None:
            _waiting.put(None)
            thread.join(_END_SECONDS)
            if thread.is_alive():
                _log.warning("TensorFlow did not take what was left for its queues within %g seconds", _END_SECONDS)


def _run() -> None:
    while True:
        delivery = _waiting.get()
        if delivery is None:
            return
        handle, ticket = delivery
        try:
            tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tf.constant(ticket, tf.int64)])
        except Exception as error:  # the graph that was waiting is gone, and its queue with it
            _log.debug("ticket %d found no queue: %s", ticket, error)


def _after_fork() -> None:
    global _lock, _thread, _waiting
    _lock, _thread, _waiting = threading.Lock(), None, queue.SimpleQueue()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(
    stop
)  # before the runtime registers its own end, so that this runs after it, when everything is complete
