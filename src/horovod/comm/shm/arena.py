"""The shared memory through which the engine ``shm`` moves data.

With n ranks and pieces of P bytes, it has three parts::

    words      futex words, see horovod.comm.shm.futex_words
    slot 0     contribution of rank 0 [P] ... contribution of rank n-1 [P] | result [P]
    slot 1     the same

Piece k uses slot k mod 2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from horovod.comm.datatypes import Array
from horovod.comm.shm.futex_words import word_bytes
from horovod.comm.shm.shared_memory import SharedMemory, created, duplicated, in_pages
from horovod.comm.spans import IOVEC_BYTES, VECTORS

DEFAULT_PIECE = 1 << 20

# ssize_t preadv(int descriptor, const struct iovec *iovecs, int count, off_t start)
_libc = ctypes.CDLL(None, use_errno=True)
# None where the system lacks the call. Every system with futexes has both.
_preadv, _pwritev = (getattr(_libc, name, None) for name in ("preadv", "pwritev"))
for _call in (_preadv, _pwritev):
    if _call is not None:
        _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        _call.restype = ctypes.c_ssize_t


_ADVICE = ". Was a tensor resized or freed during the collective?"


def _check_copied(position: int, stop: int) -> None:
    if position != stop:
        raise OSError(f"a copy of tensors to or from shared memory ended short of {stop - position} bytes{_ADVICE}")


class Arena(SharedMemory):
    """One rank's mapping of the arena. One rank creates the arena with :meth:`create`, the others use :meth:`attach`.

    Args:
        descriptor: of the memory. This object owns it from now on, even if mapping fails.
        length: bytes of the whole arena.
        piece_bytes: bytes of a piece, P in the module's docstring.
    """

    def __init__(self, descriptor: int, length: int, piece_bytes: int) -> None:
        super().__init__(descriptor, length)
        self.piece_bytes = piece_bytes

    @staticmethod
    def header_bytes(size: int) -> int:
        """The offset of the slots in bytes."""
        return in_pages(word_bytes(size))

    @classmethod
    def create(cls, size: int, piece_bytes: int = 0) -> Arena:
        """A new arena for ``size`` ranks.

        Args:
            size: the number of ranks.
            piece_bytes: bytes a rank moves at a time, rounded up to whole pages; 0 for the default.

        Raises:
            OSError: the kernel refuses, or has no futexes that this code can use.
        """
        piece = in_pages(piece_bytes or DEFAULT_PIECE)
        length = cls.header_bytes(size) + 2 * (size + 1) * piece
        return cls(created(length), length, piece)

    @classmethod
    def attach(cls, descriptor: int, length: int, piece_bytes: int) -> Arena:
        """Map the arena of a descriptor that was passed to this process.

        Args:
            descriptor: is duplicated; the caller still closes it.
            length, piece_bytes: those of the arena on the rank that created it.

        Raises:
            OSError: the memory cannot be mapped.
            ValueError: the memory has another size than ``length``.
        """
        return cls(duplicated(descriptor, length), length, piece_bytes)

    # The kernel gathers and scatters small vectors in a third of the time of a Python loop over arrays of a few kilobytes.
    # ``iovecs`` are rows as :meth:`Spans.iovecs` returns them, of ``stop - start`` bytes in all.

    def gather(self, start: int, stop: int, iovecs: Array) -> None:
        """Gather the memory ranges ``iovecs`` into bytes ``[start, stop)``."""
        self._move(_pwritev, start, stop, iovecs)

    def scatter(self, start: int, stop: int, iovecs: Array) -> None:
        """Scatter bytes ``[start, stop)`` into the memory ranges ``iovecs``."""
        self._move(_preadv, start, stop, iovecs)

    def _move(self, call: Any, start: int, stop: int, iovecs: Array) -> None:
        address = iovecs.ctypes.data
        for first in range(0, len(iovecs), VECTORS):
            moved = call(self.descriptor, address + first * IOVEC_BYTES, min(VECTORS, len(iovecs) - first), start)
            if moved < 0:
                number = ctypes.get_errno()
                raise OSError(
                    number, f"a tensor cannot be copied to or from shared memory: {os.strerror(number)}{_ADVICE}"
                )
            start += moved
        _check_copied(start, stop)

    def scatter_over(self, start: int, stop: int, targets: Sequence[Array]) -> None:
        """Scatter bytes ``[start, stop)`` into arrays of that total size."""
        for first in range(0, len(targets), VECTORS):
            some: Sequence[Any] = targets[first : first + VECTORS]  # NumPy declares buffers for newer Pythons only
            start += os.preadv(self.descriptor, some, start)
        _check_copied(start, stop)
