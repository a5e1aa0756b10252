"""The tree of connections for liveness. Pure.

Without relays every rank is connected with rank 0. The relays of a host are its first two ranks: they are connected with rank
0, and the other ranks of the host with both of them. There are two, so that after the loss of one the others can report it
through the second one, which can also look at the lost process::

    0
      1, 2, 3          the ranks of its own host
      4, 5             the relays of another host
        6, 7           each connected with 4 and with 5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

RELAYS = 2
"""How many ranks of a host are connected with rank 0."""


class LivenessTree:
    """The connections of a job's monitors.

    Args:
        size: how many ranks there are.
        hosts: the ranks of each host whose ranks are to have relays, in order. A host with no more ranks than relays has none.
            The host of rank 0 is left out.
    """

    def __init__(self, size: int, hosts: Iterable[Sequence[int]] = ()) -> None:
        self._size = size
        self._relays = {
            rank: tuple(ranks[:RELAYS]) for ranks in hosts if len(ranks) > RELAYS for rank in ranks[RELAYS:]
        }

    def above(self, rank: int) -> Sequence[int]:
        """The ranks through which this one is connected with rank 0, in the order of preference; empty for rank 0."""
        return () if rank == 0 else self._relays.get(rank, (0,))

    def ways(self, rank: int) -> Mapping[int, Sequence[int]]:
        """By rank below this one: the connections through which it can be reached, in the order of preference."""
        if rank == 0:
            return {other: self._relays.get(other, (other,)) for other in range(1, self._size)}
        return {other: (other,) for other, relays in self._relays.items() if rank in relays}

    def peers(self, rank: int) -> list[int]:
        """The ranks that this one is connected with."""
        return sorted({*self.above(rank), *(link for ways in self.ways(rank).values() for link in ways)})
