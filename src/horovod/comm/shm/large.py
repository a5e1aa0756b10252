"""Chooses the path of a large collective on one host: through the arena, or by direct reads.

Which path is faster, and whether the kernel permits direct reads, is not known in advance. So the ranks time both paths. All
ranks take the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from horovod.comm.reduction import Workspace
from horovod.comm.shm.direct_reads import NOTHING, DirectCollectives, ExchangeFunction, exchange_rank_infos
from horovod.comm.shm.futex_words import WORD_BYTES

_LARGE = 8 << 20
"""Smallest size at which both paths are timed."""

SCATTERED = 16 << 10
"""Smallest average size of vectors for direct reads, which handle vectors one by one. Smaller vectors go through the arena, and
an allreduce of them is gathered and scattered by the kernel."""

ARENA = 0
"""The path through the arena; 1 is the path of direct reads."""

_WARM = 1
"""Warm-up calls of each path, whose times are not used: they touch new memory and fill caches."""

_TRIES = 3
"""Timed calls of each path, alternating; their medians are compared."""

_REST = 50
_LONGEST_REST = 800
"""Number of calls until the paths are timed again, at first and at most; the number doubles each time."""


class Preference:
    """Chooses the faster of path 0 and path 1 for one repeated kind of call, by timing both.

    Which one is faster depends on facts that cannot be queried: whether the ranks' cores share a cache, the page size of the
    tensors' memory, other users of the machine. Pure: ranks that make the same calls, with the same arguments to
    :meth:`settle`, choose the same path.

    Attributes:
        path: the path to take now.
        trying: whether to time this call and report it to :meth:`took`; if not, call :meth:`rested`.
    """

    def __init__(self) -> None:
        self.path = ARENA
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
        """Record how long this call took on the present path, and take the other path next."""
        self._times[self.path].append(seconds)
        self.path = 1 - self.path

    @property
    def due(self) -> bool:
        """Whether both paths have been timed, so that the ranks can :meth:`settle`."""
        return all(len(times) == _WARM + _TRIES for times in self._times)

    @property
    def medians(self) -> list[float]:
        """The median time of each path on this rank, in seconds."""
        return [median(times[_WARM:]) for times in self._times]

    def settle(self, seconds: Sequence[float]) -> None:
        """Choose a path until the next timing.

        Args:
            seconds: the times of each path, summed over the ranks; the same on all of them.
        """
        self.path = int(seconds[1] < seconds[0])
        self.trying = False
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        for times in self._times:
            times.clear()


class Large:
    """One rank's choice of paths. All ranks must call it with the same arguments; then they choose the same path.

    Args:
        rank: this rank's index in the group.
        reading: when ranks read one another's memory: ``auto``, if it is faster; ``always``, if they can; ``never``. The same
            on all ranks.
        exchange, advance, workspace: for :class:`~horovod.comm.shm.direct_reads.DirectCollectives`.
        exchange_bytes: how many bytes a rank can send in one call of ``exchange``.
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
        """Carry out a collective by the faster path for its kind and size, or by the only possible one.

        Args:
            kind: the name of the operation; each kind and size class is timed separately.
            nbytes, vectors: the size of the data, and the number of vectors.
            addresses: how many addresses each rank sends for direct reads.
            directly: carries out the collective by direct reads; returns False, on all ranks, if it has done nothing.
            streamed: carries out the collective through the arena.
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
            self._exchange(NOTHING)  # all ranks begin at once, so that no rank's time includes waiting for others
            began = time.perf_counter()
        else:
            preference.rested()
        if preference.path == ARENA or not directly(direct):
            streamed()
        if timed:
            preference.took(time.perf_counter() - began)
            if preference.due:
                medians = [int(seconds * 1e9) for seconds in preference.medians]
                preference.settle(np.sum(self._exchange(np.array(medians, np.uintp)), axis=0).tolist())

    def _reach(self, nbytes: int, vectors: int, addresses: int) -> DirectCollectives | None:
        """The direct collectives, if they can carry out a collective of this size and may be faster; else None.

        The first call that gets past the size checks asks all ranks whether they can read one another's memory."""
        least = 0 if self._reading == "always" else _LARGE
        if self._impossible or self._reading == "never" or nbytes < max(least, SCATTERED * vectors):
            return None
        if (1 + addresses) * WORD_BYTES > self._exchange_bytes:
            return None
        if self._direct is None:
            processes = exchange_rank_infos(self._rank, self._exchange)
            if processes is None:
                self._impossible = True
                return None
            self._direct = DirectCollectives(self._rank, processes, self._exchange, self._advance, self._workspace)
        return self._direct
