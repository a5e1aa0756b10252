"""Which rank holds the others up, and where in a step it loses the time. Pure.

Every rank waits for the last one that submits a collective. By how much that is later than all others is what it costs them;
it is lost since the collective before, or since an earlier one where ranks submit several without waiting for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

from horovod.diagnose.finding import Finding
from horovod.diagnose.job import Job, ranks_in_words
from horovod.observe.dump import Collective

LEAST_SHARE = 0.05
"""The share of the time by which a rank must hold up the others, more than any other does, to be named."""
LEAST_COLLECTIVES = 20


class Delay(NamedTuple):
    """What one rank costs the others.

    Attributes:
        share: of the observed time.
        collectives: how many were observed.
        lost: the seconds that it loses before each collective, in all, by its name.
        after: the collective that comes before the one before which it loses most.
    """

    process_set: int
    rank: int
    share: float
    collectives: int
    lost: dict[str, float]
    after: str


def findings(job: Job) -> list[Finding]:
    """The rank that holds the others up, if one does."""
    delays = [
        delay
        for number, ranks in job.members().items()
        if len(ranks) > 1 and all(rank in job.dumps for rank in ranks)
        if (delay := delay_of(job, number, ranks)) is not None
    ]
    return [_finding(job, max(delays, key=lambda each: each.share))] if delays else []


def delay_of(job: Job, process_set: int, ranks: list[int]) -> Delay | None:
    """The rank that holds the others of a process set up; None if none does."""
    known = {rank: {each.order: each for each in job.collectives(rank, process_set) if each.order} for rank in ranks}
    common = sorted(set.intersection(*(set(each) for each in known.values())))
    if len(common) < LEAST_COLLECTIVES:
        return None
    lost: dict[int, defaultdict[str, float]] = {rank: defaultdict(float) for rank in ranks}
    late = dict.fromkeys(ranks, 0.0)
    before: dict[int, Collective] = {}
    for order in common:
        records = {rank: known[rank][order] for rank in ranks}
        times = {rank: job.time(rank, each.submitted) for rank, each in records.items()}
        now = dict.fromkeys(ranks, 0.0)
        last = max(ranks, key=lambda rank: times[rank])
        now[last] = times[last] - max(times[rank] for rank in ranks if rank != last)
        overlaps = any(each.ended is None or each.ended > records[rank].submitted for rank, each in before.items())
        lost[last][records[last].name] += max(0.0, now[last] - (late[last] if overlaps else 0.0))
        late, before = now, records
    whole = job.time(ranks[0], known[ranks[0]][common[-1]].submitted) - job.time(
        ranks[0], known[ranks[0]][common[0]].submitted
    )
    if whole <= 0:
        return None
    shares = sorted(((sum(lost[rank].values()) / whole, rank) for rank in ranks), reverse=True)
    if shares[0][0] - shares[1][0] < LEAST_SHARE:
        return None
    share, rank = shares[0]
    most = max(lost[rank], key=lambda name: lost[rank][name])
    names = [known[rank][order].name for order in common]
    after = Counter(one for one, two in pairwise(names) if two == most).most_common(1)
    return Delay(process_set, rank, share, len(common), dict(lost[rank]), after[0][0] if after else "")


def _finding(job: Job, delay: Delay) -> Finding:
    most = max(delay.lost, key=lambda name: delay.lost[name])
    records = {each.name: each for each in job.collectives(delay.rank, delay.process_set)}
    part = delay.lost[most] / sum(delay.lost.values())
    others = [rank for rank in job.members()[delay.process_set] if rank != delay.rank]
    where = f"before '{most}' ({records[most].call_site})"
    if delay.after and delay.after != most:
        where = f"between '{delay.after}' ({records[delay.after].call_site}) and '{most}' ({records[most].call_site})"
    text = (
        f"Rank {delay.rank} (host {job.host(delay.rank)}) is slower than the others: {ranks_in_words(others)} "
        f"{'waits' if len(others) == 1 else 'wait'} {delay.share:.0%} of the time for it, over the last {delay.collectives} "
        f"collectives. It loses {part:.0%} of that {where}."
    )
    return Finding(
        "straggler", [delay.rank], text, most, delay.process_set, 0, others, {delay.rank: records[most].call_site}
    )
