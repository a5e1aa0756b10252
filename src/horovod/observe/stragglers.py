"""Finds the rank that delays the others, and in which phase of a step, on rank 0 from the progress of all ranks. Pure.

In each step the ranks wait for the last one, and that one waits least. So the cost of the rank that waits least is the
difference to the rank that waits second least. This needs no comparison of clocks. Ranks that are last in turn wait for about
the same time, so none is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from horovod._base.config import Config
from horovod.observe.progress import PHASES, StepProgress

LEAST_SHARE = Config.straggler_percent / 100
"""The share of their time that a rank must cost the others to be named, if the user does not choose another."""
STEPS = 100
"""Over how many steps the ranks are compared."""
_AGAIN_SECONDS = 600.0
"""The time after which the same message is repeated."""


class Total:
    """The sum of a rank's progress since the ranks were compared last."""

    __slots__ = ("awaited", "line", "phases", "seconds", "steps", "waiting_by_set")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.phases = [0.0] * len(PHASES)
        self.waiting_by_set: dict[int, float] = {}
        self.awaited = self.line = ""

    def add(self, progress: StepProgress) -> None:
        self.seconds += progress.seconds
        self.steps += progress.steps
        self.phases = [one + two for one, two in zip(self.phases, progress.phases, strict=True)]
        for number, seconds in progress.waiting_by_set.items():
            self.waiting_by_set[number] = self.waiting_by_set.get(number, 0.0) + seconds
        if progress.awaited:
            self.awaited, self.line = progress.awaited, progress.line


class Straggler(NamedTuple):
    """A rank that delays the others.

    Attributes:
        share: the share of their time that the others lose because of it.
        phase: the phase (of :data:`PHASES`) that explains at least half of what the others lose; "" if none does.
        longer: by how many seconds it takes longer in each step.
        step_seconds: the duration of a step in seconds.
        awaited, line: the collective that another rank waits for most, and the script's line there.
    """

    process_set: int
    rank: int
    share: float
    phase: str
    longer: float
    step_seconds: float
    steps: int
    awaited: str
    line: str


def slowest(waits: Mapping[int, float], least_share: float) -> tuple[int, float] | None:
    """The rank that delays the others, and the share of their time that it costs them; None if none does.

    Every reader of what ranks did names the rank by this rule: the log, the diagnosis and the summary of a timeline.

    Args:
        waits: by rank, the share of the time in which it has waited for other ranks.
    """
    if len(waits) < 2:
        return None
    (least, rank), (second, _) = sorted((share, rank) for rank, share in waits.items())[:2]
    return (rank, second - least) if second - least > least_share else None


def straggler(process_set: int, totals: Mapping[int, Total], least_share: float) -> Straggler | None:
    """The rank that delays the other ranks of a process set; None if none does.

    Args:
        totals: by rank, over the same steps.
    """
    if len(totals) < 2 or any(each.steps == 0 or each.seconds <= 0 for each in totals.values()):
        return None
    waits = {rank: each.waiting_by_set.get(process_set, 0.0) / each.seconds for rank, each in totals.items()}
    found = slowest(waits, least_share)
    if found is None:
        return None
    slow, share = found
    own = totals[slow]
    others = [each for rank, each in totals.items() if rank != slow]
    longer = [
        own.phases[phase] / own.steps - sum(each.phases[phase] / each.steps for each in others) / len(others)
        for phase in range(len(PHASES))
    ]
    most = max(range(len(PHASES)), key=lambda phase: longer[phase])
    waiter = totals[max(waits, key=lambda rank: waits[rank])]
    step_seconds = own.seconds / own.steps
    explained = longer[most] >= share * step_seconds / 2
    return Straggler(
        process_set,
        slow,
        share,
        PHASES[most] if explained else "",
        longer[most] if explained else 0.0,
        step_seconds,
        own.steps,
        waiter.awaited,
        waiter.line,
    )


class StragglerWatch:
    """Compares the ranks' progress at intervals.

    Args:
        least_share: the share of the time that a rank must cost the others to be named; 0: no rank is named.
    """

    def __init__(self, least_share: float) -> None:
        self._least_share = least_share
        self._totals: dict[int, Total] = {}
        self._begun: set[int] = set()
        self._said: dict[tuple[int, int, str], float] = {}

    def add(self, rank: int, progress: StepProgress) -> None:
        """Take a rank's progress. Everything up to its first steps is ignored, because the rank is starting up."""
        if rank not in self._begun:
            if progress.steps:
                self._begun.add(rank)
            return
        self._totals.setdefault(rank, Total()).add(progress)

    def found(self, process_sets: Mapping[int, Sequence[int]], now: float) -> list[Straggler]:
        """The messages that are due now.

        Args:
            process_sets: the ranks of each.
        """
        size = len(process_sets[0])
        if len(self._totals) < size or min(each.steps for each in self._totals.values()) < STEPS:
            return []
        totals, self._totals = self._totals, {}
        if not self._least_share:
            return []
        return [each for each in _stragglers(process_sets, totals, self._least_share) if self._is_new(each, now)]

    def _is_new(self, found: Straggler, now: float) -> bool:
        key = found.process_set, found.rank, found.phase
        if now - self._said.get(key, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return False
        self._said[key] = now
        return True


def _stragglers(
    process_sets: Mapping[int, Sequence[int]], totals: Mapping[int, Total], least_share: float
) -> Iterable[Straggler]:
    for number, ranks in process_sets.items():
        if all(rank in totals for rank in ranks):
            found = straggler(number, {rank: totals[rank] for rank in ranks}, least_share)
            if found is not None:
                yield found


def describe(found: Straggler, host: str) -> str:
    """One line for the log."""
    where = f" in {found.phase}" if found.phase else ""
    longer = f": it takes {found.longer * 1e3:.1f} ms longer there than they do" if found.phase else ""
    at = f" They wait at '{found.awaited}'" + (f" ({found.line})." if found.line else ".") if found.awaited else ""
    group = f" of process set {found.process_set}" if found.process_set else ""
    return (
        f"rank {found.rank} on host {host} holds up the other ranks{group}{where}{longer}. It cost them {found.share:.0%} of "
        f"the last {found.steps} steps, which took {found.step_seconds * 1e3:.1f} ms each.{at}"
    )
