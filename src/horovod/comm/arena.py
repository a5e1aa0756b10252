"""The shared memory of one group of ranks on one host, and the counters by which they wait for each other.

The memory has no name: the first rank makes it with ``memfd_create`` and passes the descriptor, so nothing is left behind
however the ranks end, and no limit of ``/dev/shm`` applies. n ranks, pieces of P bytes::

    counters   one line of 128 bytes a rank:  packed | reduced | note 0 | note 1 | offer | verdict | shut
               (64-bit words, written by that rank only; the last three: see horovod.comm.express)
    express    two slots, each with a block of every rank
    slot 0     contribution of rank 0 [P] ... contribution of rank n-1 [P] | result [P]
    slot 1     the same: piece k lives in slot k mod 2

A counter only grows: it tells how many pieces its rank has packed, or reduced, since the arena was made. Waiting for a rank
is waiting until its counter reaches a value.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from horovod.comm import futex
from horovod.comm.base import Aborted, PeerFailure
from horovod.comm.datatypes import Array

PACKED = 0
REDUCED = 1
NOTES = 2
OFFER = 4
VERDICT = 5
SHUT = 6

WORD = 8
"""Bytes of a word."""

EXPRESS_BYTES = 20 << 10
"""What one rank lays down for a small collective that travels by express."""

_LINE_WORDS = 16
_POISON = 1 << 62
SHORT_SPIN = 40
"""Looks at a counter before sleeping: about two microseconds, what a sleep and a wake-up would cost at least."""

LONG_SPIN = 600
"""The same, about thirty microseconds, for a small collective on which a rank waits with nothing else to do."""

DEFAULT_PIECE = 1 << 20
_PAGE = mmap.PAGESIZE
_VECTORS = os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16
"""How many places one system call takes."""

# ssize_t preadv(int descriptor, const struct iovec *places, int count, off_t start)
_libc = ctypes.CDLL(None, use_errno=True)
_preadv, _pwritev = _libc.preadv, _libc.pwritev
for _call in (_preadv, _pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def word_index(rank: int, kind: int) -> int:
    """The index of a rank's counter among the words."""
    return rank * _LINE_WORDS + kind


def _counter_bytes(size: int) -> int:
    return _round_up(size * _LINE_WORDS * WORD, _PAGE)


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
        return _counter_bytes(size) + _round_up(2 * size * EXPRESS_BYTES, _PAGE)

    def express_block(self, slot: int, rank: int, size: int) -> Array:
        """The bytes of one rank's block in one of the two slots of the express."""
        start = _counter_bytes(size) + (slot * size + rank) * EXPRESS_BYTES
        return self.bytes[start : start + EXPRESS_BYTES]

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

    def _move(self, call: Callable[[int, int, int, int], int], start: int, places: Array) -> None:
        address, stop = places.ctypes.data, start + int(places[:, 1].sum())
        for first in range(0, len(places), _VECTORS):
            moved = call(self.descriptor, address + first * 2 * WORD, min(_VECTORS, len(places) - first), start)
            if moved < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"copying to or from shared memory: {os.strerror(number)}")
            start += moved
        if start != stop:
            raise OSError(f"the kernel copied {stop - start} bytes less than it was to")

    def scatter_over(self, start: int, stop: int, targets: Sequence[Array]) -> None:
        """Copy bytes ``[start, stop)`` into arrays of that size together, one after another."""
        for first in range(0, len(targets), _VECTORS):
            some: Sequence[Any] = targets[first : first + _VECTORS]  # NumPy declares buffers for newer Pythons only
            start += os.preadv(self.descriptor, some, start)
        if start != stop:
            raise OSError(f"the kernel copied {stop - start} bytes less than it was to")

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


class Counters:
    """One rank's own counters, and its waiting for those of the others.

    Args:
        timeout: how long a peer's counter may stand still while it is waited for.
    """

    def __init__(self, arena: Arena, rank: int, size: int, timeout: timedelta) -> None:
        self._words = arena.words
        self._address = arena.address
        self._rank = rank
        self._size = size
        self._seconds = timeout.total_seconds()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._own = rank * _LINE_WORDS
        self._cores_enough = size <= len(os.sched_getaffinity(0))  # else the peer needs the core that would look
        self._aborted = False
        self._life = threading.Lock()

    def signal(self, kind: int, value: int) -> None:
        """Set this rank's counter and wake who waits for it."""
        if futex.weakly_ordered:
            futex.fence()  # what was written before must be seen before the count
        word = self._own + kind
        self._words[word] = value
        futex.wake(self._address + word * WORD)

    def note(self, parity: int, value: int) -> None:
        """Leave a number for the others, to be read once the piece it belongs to is signalled."""
        self._words[self._own + NOTES + parity] = value

    def read_note(self, rank: int, parity: int) -> int:
        return self._words[rank * _LINE_WORDS + NOTES + parity]

    def wait(self, peer: int, kind: int, value: int, spin: int = SHORT_SPIN) -> None:
        """Return when ``peer``'s counter has reached ``value``, looking ``spin`` times before sleeping.

        Raises:
            PeerFailure: it stood still for the timeout, or some rank has aborted.
            Aborted: this rank's :meth:`abort` was called.
        """
        words, word = self._words, peer * _LINE_WORDS + kind
        seen = words[word]
        if seen < value:
            for _ in range(spin if self._cores_enough else 1):
                seen = words[word]
                if seen >= value:
                    break
            else:
                seen = self._sleep(peer, word, value)
        if seen >= _POISON:
            if self._aborted:
                raise Aborted
            # Another rank's abort. Mostly its verdict is on the way here as well; if not, this one must not wait for ever.
            raise PeerFailure(
                peer, "it, or another rank, gave up a collective that others were still in", suspected=True
            )
        if futex.weakly_ordered:
            futex.fence()  # what follows must not be read before the count was

    def wait_all(self, kind: int, value: int, spin: int = SHORT_SPIN) -> None:
        """Return when every peer's counter has reached ``value``. Raises as :meth:`wait`."""
        for peer in self._peers:
            self.wait(peer, kind, value, spin)

    def _sleep(self, peer: int, word: int, value: int) -> int:
        words, address = self._words, self._address + word * WORD
        deadline = time.monotonic() + self._seconds
        while True:
            seen = words[word]
            if seen >= value:
                return seen
            if self._aborted:
                raise Aborted
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerFailure(
                    peer, f"it made no progress in a collective for {self._seconds:.0f} seconds", suspected=True
                )
            futex.wait(address, seen & 0xFFFFFFFF, remaining)

    def check(self) -> None:
        """Raises Aborted after an abort, before anything new is begun."""
        if self._aborted:
            raise Aborted

    def abort(self) -> None:
        """Wake this rank's lane out of :meth:`wait`. Any thread.

        A counter's owner may be dead or alive. The value is changed so that a sleeper that is just falling asleep cannot
        miss it, into one that no waiter of any rank takes for progress; a living owner simply writes over it.
        """
        self._aborted = True
        with self._life:
            for peer in self._peers if self._words else []:
                for kind in (PACKED, REDUCED):
                    word = peer * _LINE_WORDS + kind
                    self._words[word] = (self._words[word] ^ 0x80000000) | _POISON
                    futex.wake(self._address + word * WORD)

    def release(self) -> None:
        """Forget the arena."""
        with self._life:
            self._words = memoryview(b"")
