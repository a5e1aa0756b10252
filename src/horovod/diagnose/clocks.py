"""Aligns the clocks of ranks on several hosts by the collectives that they had in common. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from horovod.observe.clock_offset import ClockOffset, Moments
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
    offset = ClockOffset()
    for here in reference:
        for there in others:
            ours, theirs = _moments(here), _moments(there)
            for key in ours.keys() & theirs.keys():
                offset.collective(ours[key], theirs[key])
    if offset.error == math.inf:
        here, there = reference[0], others[0]
        return Offset((here.monotonic - here.unix) - (there.monotonic - there.unix), math.inf)
    return Offset(offset.seconds, offset.error)


def _moments(dump: RankDump) -> dict[tuple[int, ...], Moments]:
    ranks = {each.id: each.ranks for each in dump.process_sets}
    return {
        (*ranks[each.process_set], -1, each.order): Moments(each.submitted, each.agreed)
        for each in dump.collectives
        if each.order and each.agreed is not None and each.process_set in ranks
    }
