"""Which hosts stay in a job after a network has broken between some of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

_MOST_CHOICES = 12
"""So many hosts are left out in the best way; in a job that must leave out more, those with the most broken pairs go first."""


def connected_part(
    ranks: Mapping[str, int], cut: Collection[frozenset[str]], first: str, *, needs_first: bool
) -> set[str]:
    """The largest set of hosts, by ranks, that all reach each other.

    Args:
        ranks: by host, how many ranks it has.
        cut: pairs of hosts that cannot reach each other.
        first: the host of rank 0. Of parts with equally many ranks, the one with this host stays.
        needs_first: whether a part without that host cannot go on.
    """
    broken = {pair for pair in cut if len(pair) == 2 and pair <= ranks.keys()}
    kept = _best(dict(ranks), broken, first if needs_first else "", first, _MOST_CHOICES)
    return set(kept)


def _best(ranks: dict[str, int], cut: set[frozenset[str]], must: str, preferred: str, choices: int) -> dict[str, int]:
    if not cut:
        return ranks
    counts = Counter(host for pair in cut for host in pair)
    host = max(counts, key=lambda each: (counts[each], -ranks[each], each != preferred, each))
    beside = {each for pair in cut if host in pair for each in pair - {host}}
    without_it = [{host}] if host != must else []
    without_others = [beside] if must not in beside and (choices > 0 or not without_it) else []
    parts = [
        _best(
            {name: count for name, count in ranks.items() if name not in gone},
            {pair for pair in cut if not pair & gone},
            must,
            preferred,
            choices - 1,
        )
        for gone in (*without_it, *without_others)
    ]
    return max(parts, key=lambda part: (sum(part.values()), preferred in part), default={})
