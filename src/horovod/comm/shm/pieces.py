"""Where the pieces of a collective lie in the arena, and in which of them this rank is.

A piece has a number, the same on all ranks, and regions of the arena: one for what each rank contributes, one for the result.
There are two slots of them, which take turns: piece k lies in slot k mod 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.counters import SHORT_SPIN, Counters
from horovod.comm.shm.words import PACKED


class Pieces:
    """One rank's view of them.

    Args:
        arena: attached by every rank.
        counters: this rank's.
        rank, size: this rank in the group.
    """

    def __init__(self, arena: Arena, counters: Counters, rank: int, size: int) -> None:
        self._counters = counters
        self._rank = rank
        self._size = size
        self._bytes = arena.piece_bytes
        self._packed = 0
        starts = [[self.start(slot, owner) for owner in range(size + 1)] for slot in range(2)]
        self._regions = [[arena.bytes[start : start + self._bytes] for start in row] for row in starts]
        self._typed: dict[tuple[int, int, np.dtype[Any]], Array] = {}

    def start(self, piece: int, owner: int) -> int:
        """Where :meth:`region` begins in the arena, in bytes."""
        place = (piece & 1) * (self._size + 1) + owner
        return Arena.header_bytes(self._size) + place * self._bytes

    def region(self, piece: int, owner: int, dtype: np.dtype[Any]) -> Array:
        """The region of rank ``owner`` (``size`` for the result) for piece number ``piece``."""
        key = (piece & 1, owner, dtype)
        region = self._typed.get(key)
        if region is None:
            region = self._typed[key] = self._regions[piece & 1][owner].view(dtype)
        return region

    def begin(self, spin: int = SHORT_SPIN) -> int:
        """The number of the next piece, once its slot is free to be written by this rank.

        Args:
            spin: as of :meth:`Counters.wait`.
        """
        self._counters.wait_all(PACKED, self._packed, spin)
        self._packed += 1
        return self._packed

    def skip(self) -> int:
        """The number of the next piece, to which this rank has nothing to contribute; it has read the piece before."""
        self._packed += 1
        self._counters.signal(PACKED, self._packed)
        return self._packed

    def exchange(self, words: Array) -> list[Array]:
        """Every rank's vector of 64-bit words, once all have brought theirs."""
        piece = self.begin()
        self.region(piece, self._rank, words.dtype)[: words.size] = words
        self._counters.signal(PACKED, piece)
        self._counters.wait_all(PACKED, piece)
        return [self.region(piece, rank, words.dtype)[: words.size].copy() for rank in range(self._size)]

    def release(self) -> None:
        """Forget the arena."""
        self._typed.clear()
        self._regions.clear()
