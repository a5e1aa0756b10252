"""The shared memory of one group of ranks on one host.

The memory has no name: the first rank makes it with ``memfd_create`` and passes the descriptor, so nothing is left behind
however the ranks end, and no limit of ``/dev/shm`` applies. n ranks, pieces of P bytes::

    words      by which ranks wait for each other, see horovod.comm.shm.words
    proposals  two slots, each with a block of every rank, see horovod.comm.shm.proposals
    slot 0     contribution of rank 0 [P] ... contribution of rank n-1 [P] | result [P]
    slot 1     the same: piece k lives in slot k mod 2
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.shm import futex
from horovod.comm.shm.words import LINE_WORDS, WORD
from horovod.comm.spans import VECTORS

PROPOSAL_BYTES = 20 << 10
"""The block of one rank in one slot of the proposals."""

DEFAULT_PIECE = 1 << 20
_PAGE = mmap.PAGESIZE

# ssize_t preadv(int descriptor, const struct iovec *places, int count, off_t start)
_libc = ctypes.CDLL(None, use_errno=True)
_preadv, _pwritev = (
    getattr(_libc, name, None) for name in ("preadv", "pwritev")
)  # not on every system without futexes
for _call in (_preadv, _pwritev):
    if _call is not None:
        _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        _call.restype = ctypes.c_ssize_t


_ADVICE = ". Was one resized or freed while it travelled?"


def _check_copied(position: int, stop: int) -> None:
    if position != stop:
        raise OSError(f"tensors were copied to or from shared memory short of {stop - position} bytes{_ADVICE}")


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _word_bytes(size: int) -> int:
    return _round_up(size * LINE_WORDS * WORD, _PAGE)


class Arena:
    """The mapped memory, as one rank sees it. Made by :meth:`create` on one rank and :meth:`attach` on the others.

    Attributes:
        length: bytes in all.
        piece_bytes: P above.
        descriptor: of the memory; -1 once it is closed.
    """

    def __init__(self, descriptor: int, length: int, piece_bytes: int) -> None:
        self.descriptor = descriptor
        self.length = length
        self.piece_bytes = piece_bytes
        self._map = mmap.mmap(descriptor, length)
        self._map.madvise(mmap.MADV_DONTFORK)  # a forked child must neither see nor keep this memory
        self.bytes: Array = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.words = memoryview(self._map).cast("Q")

    @staticmethod
    def header_bytes(size: int) -> int:
        """How far the slots of the pieces are from the beginning."""
        return _word_bytes(size) + _round_up(2 * size * PROPOSAL_BYTES, _PAGE)

    def proposal_block(self, slot: int, rank: int, size: int) -> Array:
        """The bytes of one rank's block in one of the two slots of the proposals."""
        start = _word_bytes(size) + (slot * size + rank) * PROPOSAL_BYTES
        return self.bytes[start : start + PROPOSAL_BYTES]

    @classmethod
    def create(cls, size: int, piece_bytes: int = 0) -> Arena:
        """New memory for ``size`` ranks.

        Args:
            piece_bytes: bytes a rank moves at a time; 0 for the default.

        Raises:
            OSError: the kernel refuses, or has no futexes this code can use.
        """
        if not futex.available:
            raise OSError(f"shared memory engine: no futex on {sys.platform}")
        piece = _round_up(piece_bytes or DEFAULT_PIECE, _PAGE)
        length = cls.header_bytes(size) + 2 * (size + 1) * piece
        descriptor = os.memfd_create("horovod", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, length)
            return cls(descriptor, length, piece)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, length: int, piece_bytes: int) -> Arena:
        """The memory behind a descriptor that was passed to this process; takes one of its own.

        Raises:
            OSError, ValueError: it cannot be mapped, or is not what was announced.
        """
        if not futex.available:
            raise OSError(f"shared memory engine: no futex on {sys.platform}")
        if os.fstat(descriptor).st_size != length:
            raise ValueError("the memory has another size than was announced")
        own = os.dup(descriptor)
        try:
            return cls(own, length, piece_bytes)
        except BaseException:
            os.close(own)
            raise

    # The kernel copies what is scattered over many places: in a third of the time in which Python goes over arrays of a few
    # kilobytes. A place is an address and a number of bytes (``iovec``), a row of ``places``.

    def gather(self, start: int, places: Array) -> None:
        """Copy what lies in the places, one after another, to byte ``start``."""
        self._move(_pwritev, start, places)

    def scatter(self, start: int, places: Array) -> None:
        """Copy what lies from byte ``start`` on into the places, one after another."""
        self._move(_preadv, start, places)

    def _move(self, call: Any, start: int, places: Array) -> None:
        address, stop = places.ctypes.data, start + int(places[:, 1].sum())
        for first in range(0, len(places), VECTORS):
            moved = call(self.descriptor, address + first * 2 * WORD, min(VECTORS, len(places) - first), start)
            if moved < 0:
                number = ctypes.get_errno()
                raise OSError(
                    number, f"a tensor cannot be copied to or from shared memory: {os.strerror(number)}{_ADVICE}"
                )
            start += moved
        _check_copied(start, stop)

    def scatter_over(self, start: int, stop: int, targets: Sequence[Array]) -> None:
        """Copy bytes ``[start, stop)`` into arrays of that size together, one after another."""
        for first in range(0, len(targets), VECTORS):
            some: Sequence[Any] = targets[first : first + VECTORS]  # NumPy declares buffers for newer Pythons only
            start += os.preadv(self.descriptor, some, start)
        _check_copied(start, stop)

    def close(self) -> None:
        """Let go of the memory; it is freed when the last rank has."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.words.release()
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still looks at a part of it; the mapping goes with the last view
