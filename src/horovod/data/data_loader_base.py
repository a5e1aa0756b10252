"""Base classes of data loaders, one of which loads batches in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

_STEP_SECONDS = 1.0
"""How long the thread waits for a free slot in the queue before it checks whether it must end."""


class BaseDataLoader:
    """Base class of a loader of batches. Override ``__len__`` and :meth:`_iterate`."""

    def __len__(self) -> int:
        """The number of batches of one epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Changes a batch on its way to the training loop."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches in a thread while the training loop works. Name it before the loader in the list of base classes::

        class AsyncLoader(AsyncDataLoaderMixin, Loader): ...

    A thread runs :meth:`BaseDataLoader._iterate` again and again, one epoch after another. If it raises an exception, the
    training loop gets that exception. Call :meth:`close_async_loader` at the end.

    Args:
        async_loader_queue_size: the number of batches that are loaded ahead. 0: the training loop itself loads each batch.
        debug_data_loader: print when epochs begin and end.
        args, kwargs: the arguments of the loader.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(0, async_loader_queue_size))
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]  # of the loader that this stands before
            return
        if self.thread is None:
            self.started = True
            self.thread = threading.Thread(target=self._load, name="horovod-data-loader", daemon=True)
            self.thread.start()
        while True:
            batch = self.queue.get()
            if batch is None:
                return
            if isinstance(batch, Exception):
                raise batch
            yield loader._process_batch(batch)

    def close_async_loader(self) -> None:
        """End the thread. Batches that it has loaded are dropped."""
        self.finished_event.set()
        if self.thread is None:
            return
        while self.thread.is_alive():
            try:
                self.queue.get_nowait()
            except queue.Empty:
                self.thread.join(0.05)
        self.thread = None

    def _load(self) -> None:
        loader: Any = self
        try:
            while not self.finished_event.is_set():
                self._say("an epoch begins")
                for batch in loader._iterate():
                    if not self._put(batch):
                        return
                self._say("an epoch ends")
                if not self._put(None):
                    return
        except Exception as error:
            self._put(error)
            self._put(None)

    def _put(self, batch: Any) -> bool:
        """Hand a batch on. Returns False if the loader is being closed."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(batch, timeout=_STEP_SECONDS)
                return True
            except queue.Full:
                pass
        return False

    def _say(self, what: str) -> None:
        if self.debug_data_loader:
            print(f"{type(self).__name__}: {what}", flush=True)
