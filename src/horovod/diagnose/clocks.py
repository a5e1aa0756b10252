"""Aligns the clocks of ranks on several hosts by the collectives that they had in common. Pure.

A collective is agreed on only after every rank has submitted it. So for any two ranks, the submission on one is not later than
the agreement on the other. Each collective bounds the difference of the two clocks from both sides; many bound it closely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from horovod.observe.dump import RankDump


class Offset(NamedTuple):
    """The offset to add to a rank's times, and its greatest error, in seconds."""

    seconds: float
    error: float


def offsets(dumps: Mapping[int, RankDump]) -> dict[int, Offset]:
    """By rank, the offset of its times to the lowest rank's clock."""
    if not dumps:
        return {}
    first = dumps[min(dumps)]
    systems: dict[str, list[RankDump]] = {}
    for rank, dump in dumps.items():
        systems.setdefault(dump.boot or f"rank {rank}", []).append(dump)
    reference = next(members for members in systems.values() if first in members)
    found: dict[int, Offset] = {}
    for members in systems.values():
        offset = Offset(0.0, 0.0) if members is reference else _between(reference, members)
        found.update(dict.fromkeys((dump.rank for dump in members), offset))
    return found


def _between(reference: list[RankDump], others: list[RankDump]) -> Offset:
    low, high = float("-inf"), float("inf")
    for here in reference:
        for there in others:
            ours, theirs = _moments(here), _moments(there)
            for key in ours.keys() & theirs.keys():
                submitted, agreed = ours[key]
                submitted_there, agreed_there = theirs[key]
                low = max(low, submitted - agreed_there)
                high = min(high, agreed - submitted_there)
    if low == float("-inf") or high == float("inf"):
        here, there = reference[0], others[0]
        return Offset((here.monotonic - here.unix) - (there.monotonic - there.unix), float("inf"))
    return Offset((low + high) / 2, abs(high - low) / 2)


def _moments(dump: RankDump) -> dict[tuple[int, ...], tuple[float, float]]:
    """When this rank submitted each collective, and when it knew that all ranks had."""
    ranks = {each.id: each.ranks for each in dump.process_sets}
    return {
        (*ranks[each.process_set], -1, each.order): (each.submitted, each.agreed)
        for each in dump.collectives
        if each.order and each.agreed is not None and each.process_set in ranks
    }
