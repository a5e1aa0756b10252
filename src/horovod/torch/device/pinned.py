"""A pool of page-locked host memory. A device can copy to and from such memory asynchronously.

Locking pages takes as long as many copies, so buffers are reused. Their sizes are powers of two, so that a few of them serve
tensors of many sizes. A buffer that is never returned to the pool is freed with the last reference to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

SMALLEST = 1 << 12
IDLE_BYTES = 1 << 30


class StreamEvent(Protocol):
    """A point in a stream's work, like ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether all work before this point is done."""


class Buffer:
    """Page-locked memory.

    Attributes:
        memory: a one-dimensional uint8 tensor.
        until: the event after which the device does not use the memory any more; None: it does not use it now.
    """

    __slots__ = ("__weakref__", "memory", "until")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.until: StreamEvent | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.memory.numel()


def page_locked(size: int) -> torch.Tensor:
    """New page-locked memory of ``size`` bytes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedPool:
    """The pool of buffers. Any thread may call any method.

    Args:
        allocate: makes the memory of a new buffer of the given size in bytes.
        limit: how many bytes of idle buffers to keep besides the buffers in use. The pool checks the limit only when it makes a
            new buffer, so a job that does the same in every step keeps all buffers of a step. When the needs change, the pool
            frees the buffers that were idle for longest.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = page_locked, limit: int = IDLE_BYTES) -> None:
        self._allocate = allocate
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []  # in the order of their return
        self._in_use: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def take(self, size: int) -> Buffer:
        """Take a buffer of at least ``size`` bytes that no device uses any more."""
        wanted = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            buffer = self._find(wanted)
            if buffer is None:
                self._make_room(wanted)
        if buffer is None:
            with torch.inference_mode(False):  # later users are not in inference mode
                buffer = Buffer(self._allocate(wanted))
        buffer.until = None
        with self._lock:
            self._in_use.add(buffer)
        return buffer

    def give(self, buffer: Buffer, until: StreamEvent | None = None) -> None:
        """Return ``buffer`` to the pool. It can be taken again once the device has reached ``until``."""
        buffer.until = until
        with self._lock:
            self._in_use.discard(buffer)
            self._idle.append(buffer)

    def bytes_in_use(self) -> int:
        """The total size of the buffers that were taken, and neither returned nor freed."""
        with self._lock:
            return sum(buffer.size for buffer in self._in_use)

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._idle.clear()

    def _find(self, size: int) -> Buffer | None:
        for position, buffer in enumerate(self._idle):
            if buffer.size == size and (buffer.until is None or buffer.until.query()):
                return self._idle.pop(position)
        return None

    def _make_room(self, size: int) -> None:
        excess = size + sum(buffer.size for buffer in self._idle) - self._limit
        while self._idle and excess > 0:
            excess -= self._idle.pop(0).size
