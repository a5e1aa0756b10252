"""The pieces of a collective in the arena, and the counters with which the ranks of a host wait for each other's pieces.

A piece has a number, the same on all ranks, and regions of the arena: one for each rank's contribution, and one for the result.
There are two slots of regions, used alternately: piece k uses slot k mod 2.

A counter only grows: it is the number of pieces that its rank has packed, or reduced, since the arena was made. A rank waits
for another one until that rank's counter reaches a value.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np

from horovod.comm.base import Aborted, OnStall, PeerFailure, Stall, give_up
from horovod.comm.datatypes import Array
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.futex_words import PACKED, PROGRESS, REDUCED, FutexWords, word_index

_POISON = 1 << 62
SHORT_SPIN = 40
"""Polls of a counter before sleeping: about two microseconds, the least that a sleep and a wake-up cost."""

LONG_SPIN = 600
"""Polls before sleeping, for about thirty microseconds, where a rank has nothing else to do: in a small reduction, and in a
broadcast, in which the root writes while the other ranks read."""


class Counters:
    """One rank's own counters, and its waits for the counters of other ranks.

    Args:
        arena: attached by every rank.
        rank, size: this rank's index in the group, and the size of the group.
        stall_timeout: how long a peer may make no progress, while this rank waits for its counter.
        on_stall: called when a peer has made no progress for ``stall_timeout``.
        spins: whether to poll for a while before sleeping; false if a peer may need the core.
    """

    def __init__(
        self,
        arena: Arena,
        rank: int,
        size: int,
        stall_timeout: timedelta,
        on_stall: OnStall = give_up,
        spins: bool = True,
    ) -> None:
        self._words = FutexWords(arena.words, arena.address, rank, size)
        self._rank = rank
        self._seconds = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._peers = [peer for peer in range(size) if peer != rank]
        self._own = word_index(rank, 0)
        self._lines = [word_index(each, 0) for each in range(size)]
        self._spins = spins
        self._aborted = False
        self._life = threading.Lock()

    def signal(self, kind: int, value: int) -> None:
        """Set this rank's counter and wake the ranks that wait for it.

        Raises:
            Aborted: this rank's :meth:`abort` was called. The peers see the abort instead of the value.
        """
        self._words.publish(self._own + kind, value)
        if self._aborted:  # if abort() came before the write above, that write has overwritten abort()'s value
            self._words.overwrite(self._own + kind, _POISON)
            raise Aborted

    def advance(self) -> None:
        """Show the ranks that wait for this rank's counters that this rank makes progress in a long operation.

        Raises:
            Aborted: this rank's :meth:`abort` was called.
        """
        self.check()
        self._words.values[self._own + PROGRESS] += 1

    def wait(self, peer: int, kind: int, value: int, spin: int = SHORT_SPIN) -> None:
        """Return when ``peer``'s counter has reached ``value``; poll ``spin`` times before sleeping.

        Raises:
            PeerFailure: some rank has aborted.
            Aborted: this rank's :meth:`abort` was called.
        """
        words, word = self._words.values, self._lines[peer] + kind
        seen = words[word]
        if seen < value:
            for _ in range(spin if self._spins else 1):
                seen = words[word]
                if seen >= value:
                    break
            else:
                seen = self._sleep(peer, word, value)
        if seen >= _POISON:
            if self._aborted:
                raise Aborted
            # Another rank has aborted. Usually the liveness monitor reports its failure, too, but this wait must end anyway.
            raise PeerFailure(
                peer, "it, or another rank, gave up a collective that other ranks had not finished", suspected=True
            )
        self._words.read_fence()

    def wait_all(self, kind: int, value: int, spin: int = SHORT_SPIN) -> None:
        """Return when every peer's counter has reached ``value``. Raises as :meth:`wait`."""
        for peer in self._peers:
            self.wait(peer, kind, value, spin)

    def _sleep(self, peer: int, word: int, value: int) -> int:
        words = self._words
        deadline = time.monotonic() + self._seconds
        sign_of_life = word_index(peer, PROGRESS)
        progress = words.values[sign_of_life]
        reports = 0
        while True:
            seen = words.values[word]
            if seen >= value:
                return seen
            if self._aborted:
                raise Aborted
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if progress != words.values[sign_of_life]:
                    progress, reports = words.values[sign_of_life], 0
                else:
                    reports += 1
                    self._on_stall(Stall(peer, reports * self._seconds, reports))
                remaining = self._seconds
                deadline = time.monotonic() + remaining
            words.sleep(word, seen, remaining)

    def check(self) -> None:
        """Raise Aborted if this rank's :meth:`abort` was called. Collectives call it before they begin."""
        if self._aborted:
            raise Aborted

    def abort(self) -> None:
        """Interrupt :meth:`wait` of this rank's worker thread, and mark this rank's counters as aborted for its peers. Any
        thread may call it.

        It overwrites the counters of all ranks, since this rank may be asleep on any of them, and the counter's owner may be
        dead. The new value differs from the old one in the bits that a futex compares, so a thread that is about to sleep
        cannot miss it, and no rank mistakes it for progress. A living peer overwrites its own counters again. This rank's
        counters keep the new value: the memory of its tensors may be reused from now on, so a peer that still reads that memory
        must not use the data.
        """
        self._aborted = True
        with self._life:
            values = self._words.values
            for rank in [self._rank, *self._peers] if values else []:
                for kind in (PACKED, REDUCED):
                    word = word_index(rank, kind)
                    self._words.overwrite(word, (values[word] ^ 0x80000000) | _POISON)

    def release(self) -> None:
        """Drop the reference to the arena."""
        with self._life:
            self._words.release()


class Pieces:
    """One rank's view of the pieces: their positions in the arena, and the number of this rank's next piece.

    Args:
        arena: attached by every rank.
        counters: those of this rank.
        rank, size: this rank's index in the group, and the size of the group.
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
        """The offset in the arena, in bytes, of the :meth:`region` with the same ``piece`` and ``owner``."""
        index = (piece & 1) * (self._size + 1) + owner
        return Arena.header_bytes(self._size) + index * self._bytes

    def region(self, piece: int, owner: int, dtype: np.dtype[Any]) -> Array:
        """The region of rank ``owner`` (``size`` for the result) for piece number ``piece``."""
        key = (piece & 1, owner, dtype)
        region = self._typed.get(key)
        if region is None:
            region = self._typed[key] = self._regions[piece & 1][owner].view(dtype)
        return region

    def begin(self, spin: int = SHORT_SPIN) -> int:
        """Wait until this rank may write into the slot of the next piece; return the number of that piece.

        Args:
            spin: as in :meth:`Counters.wait`.

        Raises:
            PeerFailure, Aborted: as :meth:`Counters.wait`.
        """
        self._counters.wait_all(PACKED, self._packed, spin)
        self._packed += 1
        return self._packed

    def skip(self) -> int:
        """Count the next piece as packed without contributing to it; return its number.

        This rank must have finished reading the previous piece."""
        self._packed += 1
        self._counters.signal(PACKED, self._packed)
        return self._packed

    def exchange(self, words: Array) -> list[Array]:
        """All-gather a vector of 64-bit words, of the same length on all ranks; return all ranks' vectors, by rank.

        Every rank must call it. The vector must fit into one piece."""
        piece = self.begin()
        self.region(piece, self._rank, words.dtype)[: words.size] = words
        self._counters.signal(PACKED, piece)
        self._counters.wait_all(PACKED, piece)
        return [self.region(piece, rank, words.dtype)[: words.size].copy() for rank in range(self._size)]

    def release(self) -> None:
        """Drop the reference to the arena."""
        self._typed.clear()
        self._regions.clear()
