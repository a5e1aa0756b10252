"""Which way a large collective goes on one host: through the arena, or read where it lies.

Nobody knows beforehand which is quicker, nor whether the kernel permits the second; so both are found out, and all ranks go
the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from horovod.comm.reduction import Workspace
from horovod.comm.shm.direct import NOTHING, Direct, Exchange, exchange_rank_infos
from horovod.comm.shm.preference import Preference
from horovod.comm.shm.words import WORD

_LARGE = 8 << 20
"""From so many bytes on it is tried which way is quicker."""

SCATTERED = 16 << 10
"""Vectors that are smaller than this on average are not worth while to be treated one by one."""


class Large:
    """One rank's choice. All ranks decide alike as long as they call it with the same arguments.

    Args:
        rank: this rank in the group.
        reading: whether ranks read one another's memory: ``auto``, where it is quicker; ``always``, where they can; ``never``.
            The same on all ranks.
        exchange, advance, workspace: for :class:`~horovod.comm.shm.direct.Direct`.
        exchange_bytes: what a rank can lay down in an exchange.
    """

    def __init__(
        self,
        rank: int,
        reading: str,
        exchange: Exchange,
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
        self._direct: Direct | None = None
        self._preferences: dict[tuple[str, int], Preference] = {}

    def run(
        self,
        kind: str,
        nbytes: int,
        vectors: int,
        addresses: int,
        directly: Callable[[Direct], bool],
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

        def if_readable() -> None:
            if not directly(direct):
                streamed()

        if self._reading == "always":
            if_readable()
        else:
            self._prefer(self._preferences.setdefault((kind, nbytes.bit_length()), Preference()), streamed, if_readable)

    def _prefer(self, preference: Preference, *ways: Callable[[], None]) -> None:
        """Go one of two ways, as the ranks prefer, and time it if they do not know yet."""
        way = ways[preference.way]
        if not preference.trying:
            preference.rested()
            way()
            return
        self._exchange(NOTHING)  # all begin at once, so that nobody's time has waiting for others in it
        began = time.perf_counter()
        way()
        preference.took(time.perf_counter() - began)
        if preference.due:
            medians = [int(seconds * 1e9) for seconds in preference.medians]
            preference.settle(np.sum(self._exchange(np.array(medians, np.uintp)), axis=0).tolist())

    def _reach(self, nbytes: int, vectors: int, addresses: int) -> Direct | None:
        """What carries out such a collective without the arena, if that may be worth while, and is possible."""
        least = 0 if self._reading == "always" else _LARGE
        if self._reading == "never" or nbytes < max(least, SCATTERED * vectors):
            return None
        if (1 + addresses) * WORD > self._exchange_bytes:
            return None
        if self._direct is None:
            processes = exchange_rank_infos(self._rank, self._exchange)
            if processes is None:
                self._reading = "never"
                return None
            self._direct = Direct(self._rank, processes, self._exchange, self._advance, self._workspace)
        return self._direct
