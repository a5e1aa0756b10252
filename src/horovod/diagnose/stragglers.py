"""Finds the rank that delays the others, and where in a step it loses the time. Pure.

Every rank waits for the last one that submits a collective. If ranks submit several collectives without waiting, a rank waits
the longest of these times, not the sum. :func:`horovod.observe.stragglers.slowest` names the rank by these waits, as it does in
the log. That rank loses its time before the collectives that it is the last to submit: as much as it is later than the second
last.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from horovod.diagnose.dumped_job import DumpedJob, describe_ranks
from horovod.diagnose.finding import Finding
from horovod.observe.dump import CollectiveRecord
from horovod.observe.stragglers import LEAST_SHARE, slowest

LEAST_COLLECTIVES = 20


class Delay(NamedTuple):
    """The time that one rank costs the others.

    Attributes:
        share: the lost share of the observed time.
        collectives: the number of observed collectives.
        lost: by name of a collective, the total of the seconds that it loses before collectives of this name.
        after: the collective that comes before the one before which it loses most.
    """

    process_set: int
    rank: int
    share: float
    collectives: int
    lost: dict[str, float]
    after: str


class Submissions(NamedTuple):
    """One collective of a process set: its name, and by rank when it was submitted and when it was over, by one clock."""

    name: str
    submitted: Mapping[int, float]
    ended: Mapping[int, float]


class RankDelays(NamedTuple):
    """What the ranks have waited, and lost.

    Attributes:
        waited: by rank, the seconds in which it waited for other ranks.
        lost: by rank, and by name of a collective, the seconds that the others lose because of this rank before it.
    """

    waited: dict[int, float]
    lost: dict[int, dict[str, float]]


def delays(collectives: Iterable[Submissions]) -> RankDelays:
    """The ranks' waits and losses.

    Args:
        collectives: collectives of the same ranks, in the order in which they were carried out.
    """
    waited: dict[int, float] = defaultdict(float)
    lost: dict[int, dict[str, float]] = {}
    latest: dict[int, float] = {}  # by rank, how late it was at most since `since`
    longest: dict[int, float] = {}  # by rank, how long it has waited at most since then
    since = -math.inf  # when the ranks last had everything before done
    before: Mapping[int, float] | None = None  # when the previous collective was over
    for name, submitted, ended in collectives:
        if before and all(rank in before and before[rank] <= at for rank, at in submitted.items()):
            latest, longest, since = {}, {}, max(before.values())
        last = max(submitted, key=lambda rank: submitted[rank])
        others = max((at for rank, at in submitted.items() if rank != last), default=submitted[last])
        late = max(0.0, submitted[last] - max(others, since))
        of_rank = lost.setdefault(last, defaultdict(float))
        of_rank[name] += max(0.0, late - latest.get(last, 0.0))
        latest[last] = max(late, latest.get(last, 0.0))
        for rank, at in submitted.items():
            wait = max(0.0, submitted[last] - max(at, since))
            waited[rank] += max(0.0, wait - longest.get(rank, 0.0))
            longest[rank] = max(wait, longest.get(rank, 0.0))
        before = ended
    return RankDelays(dict(waited), lost)


def findings(job: DumpedJob) -> list[Finding]:
    """The rank that delays the others, if one does."""
    found = [
        delay
        for number, ranks in job.members().items()
        if len(ranks) > 1 and all(rank in job.dumps for rank in ranks)
        if (delay := delay_of(job, number, ranks)) is not None
    ]
    return [_finding(job, max(found, key=lambda each: each.share))] if found else []


def delay_of(job: DumpedJob, process_set: int, ranks: list[int]) -> Delay | None:
    """The rank that delays the others of a process set; None if none does."""
    known = {rank: {each.order: each for each in job.collectives(rank, process_set) if each.order} for rank in ranks}
    common = sorted(set.intersection(*(set(each) for each in known.values())))
    if len(common) < LEAST_COLLECTIVES:
        return None
    waited, lost = delays(_submissions(job, {rank: known[rank][order] for rank in ranks}) for order in common)
    whole = job.time(ranks[0], known[ranks[0]][common[-1]].submitted) - job.time(
        ranks[0], known[ranks[0]][common[0]].submitted
    )
    if whole <= 0:
        return None
    named = slowest({rank: waited[rank] / whole for rank in ranks}, LEAST_SHARE)
    if named is None:
        return None
    rank, share = named
    if rank not in lost:
        return None  # it was never the last: others delay it, and one another, in turn
    most = max(lost[rank], key=lambda name: lost[rank][name])
    names = [known[rank][order].name for order in common]
    after = Counter(one for one, two in pairwise(names) if two == most).most_common(1)
    return Delay(process_set, rank, share, len(common), dict(lost[rank]), after[0][0] if after else "")


def _submissions(job: DumpedJob, records: Mapping[int, CollectiveRecord]) -> Submissions:
    """The times in the ranks' records of one collective."""
    return Submissions(
        next(iter(records.values())).name,
        {rank: job.time(rank, each.submitted) for rank, each in records.items()},
        {rank: job.time(rank, each.ended) for rank, each in records.items() if each.ended is not None},
    )


def _finding(job: DumpedJob, delay: Delay) -> Finding:
    most = max(delay.lost, key=lambda name: delay.lost[name])
    records = {each.name: each for each in job.collectives(delay.rank, delay.process_set)}
    part = delay.lost[most] / sum(delay.lost.values())
    others = [rank for rank in job.members()[delay.process_set] if rank != delay.rank]
    where = f"before '{most}' ({records[most].call_site})"
    if delay.after and delay.after != most:
        where = f"between '{delay.after}' ({records[delay.after].call_site}) and '{most}' ({records[most].call_site})"
    text = (
        f"Rank {delay.rank} (host {job.host(delay.rank)}) is slower than the others: {describe_ranks(others)} "
        f"{'waits' if len(others) == 1 else 'wait'} {delay.share:.0%} of the time for it, over the last {delay.collectives} "
        f"collectives. It loses {part:.0%} of that {where}."
    )
    return Finding(
        "straggler", [delay.rank], text, most, delay.process_set, 0, others, {delay.rank: records[most].call_site}
    )
