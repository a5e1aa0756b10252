"""Which way a large collective goes on one host: through the arena, or read where it lies.

Nobody knows beforehand which is quicker, nor whether the kernel permits the second; so both are found out, and all ranks go
the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from horovod.comm.reduction import Workspace
from horovod.comm.shm.direct import NOTHING, DirectCollectives, ExchangeFunction, exchange_rank_infos
from horovod.comm.shm.words import WORD

_LARGE = 8 << 20
"""From so many bytes on it is tried which way is quicker."""

SCATTERED = 16 << 10
"""Vectors that are smaller than this on average are not worth while to be treated one by one."""

ARENA = 0
"""The way through the arena; 1 is the other one."""

_WARM = 1
"""Tries of each way that do not count: they fetch memory, and find out what is worked out once."""

_TRIES = 3
"""Tries of each way that do, in turn; their median is compared."""

_REST = 50
_LONGEST_REST = 800
"""Calls after which the ways are tried again, at first and at most: each rest is twice as long as the one before."""


class Preference:
    """Of way 0 or way 1, for one kind of call that comes again and again: the quicker one, found out by going both.

    Whether it pays to read large tensors where they lie depends on what nobody tells: whether the ranks' cores share a cache,
    how large the pages of the tensors' memory are, who else uses the machine. Pure: all ranks that call it alike decide alike.

    Attributes:
        way: which to go now.
        trying: whether the call is one of those to be timed (:meth:`took`).
    """

    def __init__(self) -> None:
        self.way = ARENA
        self.trying = True
        self._rest = _REST
        self._left = 0
        self._times: tuple[list[float], list[float]] = ([], [])

    def rested(self) -> None:
        """Count a call that was not timed."""
        self._left -= 1
        if self._left <= 0:
            self.trying = True

    def took(self, seconds: float) -> None:
        """Note how long this call took, and go the other way next."""
        self._times[self.way].append(seconds)
        self.way = 1 - self.way

    @property
    def due(self) -> bool:
        """Whether both ways have been tried, so that the ranks can :meth:`settle`."""
        return all(len(times) == _WARM + _TRIES for times in self._times)

    @property
    def medians(self) -> list[float]:
        """Of the times of each way on this rank, in seconds."""
        return [median(times[_WARM:]) for times in self._times]

    def settle(self, seconds: Sequence[float]) -> None:
        """Decide for a while.

        Args:
            seconds: what each way took, summed over the ranks; the same on all of them.
        """
        self.way = int(seconds[1] < seconds[0])
        self.trying = False
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        for times in self._times:
            times.clear()


class Large:
    """One rank's choice. All ranks decide alike as long as they call it with the same arguments.

    Args:
        rank: this rank in the group.
        reading: whether ranks read one another's memory: ``auto``, where it is quicker; ``always``, where they can; ``never``.
            The same on all ranks.
        exchange, advance, workspace: for :class:`~horovod.comm.shm.direct.DirectCollectives`.
        exchange_bytes: what a rank can lay down in an exchange.
    """

    def __init__(
        self,
        rank: int,
        reading: str,
        exchange: ExchangeFunction,
        exchange_bytes: int,
        advance: Callable[[], None],
        workspace: Workspace,
    ) -> None:
        self._rank = rank
        self._reading = reading
        self._exchange = exchange
        self._exchange_bytes = exchange_bytes
        self._advance = advance
        self._workspace = workspace
        self._direct: DirectCollectives | None = None
        self._impossible = False
        self._preferences: dict[tuple[str, int], Preference] = {}

    def read_by(self, reading: str) -> None:
        """Change when ranks read one another's memory. All ranks call it between the same two collectives."""
        self._reading = reading

    def run(
        self,
        kind: str,
        nbytes: int,
        vectors: int,
        addresses: int,
        directly: Callable[[DirectCollectives], bool],
        streamed: Callable[[], None],
    ) -> None:
        """Carry out a collective by what is quicker for its kind and size, or by what can be.

        Args:
            nbytes, vectors: what it moves.
            addresses: how many a rank would have to tell the others to do it ``directly``.
        """
        direct = self._reach(nbytes, vectors, addresses)
        if direct is None:
            streamed()
            return
        if self._reading == "always":
            if not directly(direct):
                streamed()
            return
        call = kind, nbytes.bit_length()
        preference = self._preferences.get(call)
        if preference is None:
            preference = self._preferences[call] = Preference()
        began = 0.0
        timed = preference.trying
        if timed:
            self._exchange(NOTHING)  # all begin at once, so that nobody's time has waiting for others in it
            began = time.perf_counter()
        else:
            preference.rested()
        if preference.way == ARENA or not directly(direct):
            streamed()
        if timed:
            preference.took(time.perf_counter() - began)
            if preference.due:
                medians = [int(seconds * 1e9) for seconds in preference.medians]
                preference.settle(np.sum(self._exchange(np.array(medians, np.uintp)), axis=0).tolist())

    def _reach(self, nbytes: int, vectors: int, addresses: int) -> DirectCollectives | None:
        """What carries out such a collective without the arena, if that may be worth while, and is possible."""
        least = 0 if self._reading == "always" else _LARGE
        if self._impossible or self._reading == "never" or nbytes < max(least, SCATTERED * vectors):
            return None
        if (1 + addresses) * WORD > self._exchange_bytes:
            return None
        if self._direct is None:
            processes = exchange_rank_infos(self._rank, self._exchange)
            if processes is None:
                self._impossible = True
                return None
            self._direct = DirectCollectives(self._rank, processes, self._exchange, self._advance, self._workspace)
        return self._direct
