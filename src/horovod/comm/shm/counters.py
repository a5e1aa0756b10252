"""The counters by which the ranks of a host wait for each other, one or more for each piece of a collective.

A counter only grows: it tells how many pieces its rank has packed, or reduced, since the arena was made. Waiting for a rank
is waiting until its counter reaches a value.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from horovod.comm.base import Aborted, OnStall, PeerFailure, Stall, give_up
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.words import PACKED, PROGRESS, REDUCED, Words, word_index

_POISON = 1 << 62
SHORT_SPIN = 40
"""Looks at a counter before sleeping: about two microseconds, what a sleep and a wake-up would cost at least."""

LONG_SPIN = 600
"""The same, about thirty microseconds, where a rank waits with nothing else to do: in a small reduction, and in a broadcast,
where some ranks write while others read."""


class Counters:
    """One rank's own counters, and its waiting for those of the others.

    Args:
        stall_timeout: how long a peer may make no progress while its counter is waited for, before
        on_stall: is told.
        spins: whether to look a while before sleeping; not where a peer may need the core.
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
        self._words = Words(arena.words, arena.address, rank, size)
        self._rank = rank
        self._seconds = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._peers = [peer for peer in range(size) if peer != rank]
        self._own = word_index(rank, 0)
        self._spins = spins
        self._aborted = False
        self._life = threading.Lock()

    def signal(self, kind: int, value: int) -> None:
        """Set this rank's counter and wake who waits for it.

        Raises:
            Aborted: this rank's :meth:`abort` was called. The peers see that instead of the value.
        """
        self._words.publish(self._own + kind, value)
        if self._aborted:  # perhaps before the value was written, which then hid what abort() had written
            self._words.overwrite(self._own + kind, _POISON)
            raise Aborted

    def advance(self) -> None:
        """Tell who waits for this rank's counters that it is at work, in the middle of something long.

        Raises:
            Aborted: this rank's :meth:`abort` was called.
        """
        self.check()
        self._words.values[self._own + PROGRESS] += 1

    def wait(self, peer: int, kind: int, value: int, spin: int = SHORT_SPIN) -> None:
        """Return when ``peer``'s counter has reached ``value``, looking ``spin`` times before sleeping.

        Raises:
            PeerFailure: some rank has aborted.
            Aborted: this rank's :meth:`abort` was called.
        """
        words, word = self._words.values, word_index(peer, kind)
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
            # Another rank's abort. Mostly its failure is on the way here as well; if not, this rank must not wait for ever.
            raise PeerFailure(
                peer, "it, or another rank, gave up a collective that others were still in", suspected=True
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
        told = 0
        while True:
            seen = words.values[word]
            if seen >= value:
                return seen
            if self._aborted:
                raise Aborted
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if progress != words.values[sign_of_life]:
                    progress, told = words.values[sign_of_life], 0
                else:
                    told += 1
                    self._on_stall(Stall(peer, told * self._seconds, told))
                remaining = self._seconds
                deadline = time.monotonic() + remaining
            words.sleep(word, seen, remaining)

    def check(self) -> None:
        """Raises Aborted after an abort, before anything new is begun."""
        if self._aborted:
            raise Aborted

    def abort(self) -> None:
        """Wake this rank's worker thread out of :meth:`wait`, and let no peer count on this rank any more. Any thread.

        A counter's owner may be dead or alive. The value is changed so that a sleeper that is just falling asleep cannot
        miss it, into one that no waiter of any rank takes for progress; a living owner simply writes over it. This rank's
        own counters keep that value: a peer that still reads this rank's tensors, whose memory may be used for something
        else from now on, must not take what it reads for a result.
        """
        self._aborted = True
        with self._life:
            values = self._words.values
            for rank in [self._rank, *self._peers] if values else []:
                for kind in (PACKED, REDUCED):
                    word = word_index(rank, kind)
                    self._words.overwrite(word, (values[word] ^ 0x80000000) | _POISON)

    def release(self) -> None:
        """Forget the arena."""
        with self._life:
            self._words.release()
