"""Futures of PyTorch that are completed when a collective is done.

A future runs its callbacks on the thread that completes it. A callback may be a function of the script that waits for another
collective. So separate threads complete futures: a worker thread that ran this callback would wait for itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.torch.uncompiled import uncompiled

_log = logging.getLogger("horovod.torch")


class CompletionThreads:
    """Threads that call functions without delay: if all are busy, another thread starts. After 5 idle seconds a thread ends."""

    _IDLE_SECONDS = 5.0

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function``, which must not raise, on another thread. Never blocks. Any thread may call it."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._calls.put(function)
                return
            thread = threading.Thread(target=self._run, args=(function,), name="horovod-completion", daemon=True)
            self._threads.add(thread)
        thread.start()

    def _run(self, function: Callable[[], None] | None) -> None:
        while function is not None:
            function()
            function = None  # its closure holds tensors
            with self._lock:
                self._idle += 1
            function = self._next()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._calls.get(timeout=self._IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            if self._idle:  # no call is assigned to this thread
                self._idle -= 1
                return None
        return self._calls.get()

    def end(self) -> None:
        """End the threads that are idle, and wait for them."""
        with self._lock:
            idle, self._idle = self._idle, 0
            threads = list(self._threads)
        for _ in range(idle):
            self._calls.put(None)
        if idle == len(threads):
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join(self._IDLE_SECONDS)


threads = CompletionThreads()


class Origin:
    """Names the calls that a callback makes: after the future that the callback belongs to, with a number.

    Callbacks run when a collective is done, on any thread, and between any two calls of the script. So their calls cannot share
    the counter of the script's calls.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0

    def next(self) -> str:
        """The name of the next call or of the next callback; the same on all ranks."""
        self._count += 1
        return f"{self._path}.{self._count}"


class _Unnamed(Origin):
    """The origin in callbacks that run in no order that is the same on all ranks."""

    def next(self) -> str:
        raise NotImplementedError(
            "a callback of a future calls a collective. In a group of several back ends, and after send or recv, such calls "
            'have no order that is the same on all ranks: use a group with backend="horovod" alone, and call the collective '
            "after wait()."
        )


class _Present(threading.local):
    origin: Origin | None = None


present = _Present()
"""The origin of the callback that the calling thread runs; None in the script itself."""


@uncompiled
class CollectiveFuture(torch.futures.Future[Any]):
    """A future that names the calls of its callbacks after itself.

    Args:
        origin: names the callbacks.
        devices: the devices other than the CPU that the values may be on.
    """

    def __init__(self, origin: Origin, devices: Sequence[Any] = ()) -> None:
        super().__init__(devices=list(devices))
        self._origin = origin
        self._devices = devices

    def then(self, callback: Callable[[Any], Any]) -> Any:
        path = self._origin.next()
        calls, made = Origin(path), CollectiveFuture(Origin(f"{path}.then"), self._devices)

        def run(_: Any) -> None:
            before, present.origin = present.origin, calls
            try:
                made.set_result(callback(self))
            except Exception as error:
                _log.debug("a callback of a collective failed: %s", error)
                made.set_exception(error)
            finally:
                present.origin = before

        self.add_done_callback(run)
        return made


def future_of(
    then: Callable[[Callable[[], None]], None],
    outputs: Callable[[], object],
    origin: Origin | None,
    devices: Sequence[Any],
) -> Any:
    """A future of a collective's outputs (what ``outputs`` returns), or of the error that ``outputs`` raises.

    Args:
        then: registers a function, which is called when the collective is done.
        outputs: returns them; called when the collective is done.
        origin: names the future's callbacks; None: collectives that its callbacks call raise NotImplementedError.
        devices: the devices other than the CPU that the outputs are on.
    """
    if origin is None:
        first: torch.futures.Future[None] = torch.futures.Future(devices=list(devices))
        # C++ code sees an error that a callback raises, but not one that Python code sets with set_exception().
        second = first.then(lambda _: outputs())

        def begin() -> None:
            before, present.origin = present.origin, _Unnamed("")
            try:
                first.set_result(None)
            finally:
                present.origin = before

        then(lambda: threads.call(begin))
        return second
    future = CollectiveFuture(origin, devices)

    def complete() -> None:
        try:
            future.set_result(outputs())
        except Exception as error:
            future.set_exception(error)

    then(lambda: threads.call(complete))
    return future
