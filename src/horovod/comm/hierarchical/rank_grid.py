"""The ranks of a group as a grid of hosts and columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a group on their hosts, as one of the ranks sees them.

          host 0   host 1
            0 ------ 2       first column
            1 ------ 3       second column
                     4

    There are as many columns as the smallest host has ranks; here rank 4 is in no column. The columns share the traffic between
    hosts. A rank in no column moves data only within its host.

    Attributes:
        rank: this rank.
        hosts: the ranks of each host, ascending; hosts in the order of their first ranks.
        host: the index of this rank's host.
        index: this rank's index on its host.
        columns: the number of columns.
        column: the ranks of this rank's column, by host; None if this rank is in no column.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    host: int
    index: int
    columns: int
    column: tuple[int, ...] | None

    @classmethod
    def of(cls, names: Sequence[str], rank: int) -> RankGrid:
        """The grid of a group, from its ranks' host names."""
        ranks: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            ranks.setdefault(name, []).append(number)
        hosts = tuple(tuple(each) for each in ranks.values())
        host = list(ranks).index(names[rank])
        index = hosts[host].index(rank)
        columns = min(len(each) for each in hosts)
        column = tuple(each[index] for each in hosts) if index < columns else None
        return cls(rank, hosts, host, index, columns, column)

    def shares(self, length: int, host: int | None = None, block: int = 1) -> list[int]:
        """How many of ``length`` elements each rank of a host owns; 0 for a rank in no column.

        Args:
            host: the index of the host; None for the host of this rank.
            block: shares begin at multiples of so many elements.
        """
        blocks = -(-length // block)
        bounds = [min(length, blocks * index // self.columns * block) for index in range(self.columns + 1)]
        shares = [stop - start for start, stop in pairwise(bounds)]
        return shares + [0] * (len(self.hosts[self.host if host is None else host]) - self.columns)
