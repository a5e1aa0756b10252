"""Decides which rank's state all ranks of a new round take over: the state of the rank that is furthest ahead.

Pure but for :meth:`CommitProgress.gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod._bindings.objects import allgather_object

NOWHERE = -1
"""The step of a rank whose live state belongs to no step: the failure came in the middle of one."""


class StateReport(NamedTuple):
    """The progress of one rank.

    Attributes:
        rounds: the number of times its state was synchronised; 0 for a new process.
        live: the step at whose end the objects in use are now, or :data:`NOWHERE`.
        saved: the step at whose end the last save was made.
    """

    rounds: int
    live: int
    saved: int


class Root(NamedTuple):
    """The rank whose state all ranks take over.

    Attributes:
        rank: the lowest of the ranks that are furthest ahead.
        live: True: the state in use on that rank. False: its last save.
    """

    rank: int
    live: bool


def furthest(reports: Sequence[StateReport]) -> Root:
    """The rank to take the state from. From the same reports, in rank order, every rank computes the same answer.

    A process that has taken part before is preferred to a new one, which has only its initial state. If the live and a saved
    state are of the same step, the live one is taken, which costs no copy.
    """
    known = any(report.rounds for report in reports)
    candidates = [(rank, report) for rank, report in enumerate(reports) if report.rounds or not known]
    rank, best = max(candidates, key=lambda each: (max(each[1].live, each[1].saved), each[1].live, -each[0]))
    return Root(rank, best.live >= best.saved)


class CommitProgress:
    """The progress of this rank, counted by its commits.

    Attributes:
        rounds, step, saved: as in :class:`StateReport`; ``step`` is that of the last commit.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.step = 0
        self.saved = 0

    def gather(self, live: int) -> Root:
        """The rank whose state all ranks take over. Every rank must call it, with the step of its live state."""
        return furthest(allgather_object(StateReport(self.rounds, live, self.saved), name="elastic.progress"))

    def adopt(self, step: int) -> None:
        """Note that all ranks have, and have saved, the state of ``step``."""
        self.rounds += 1
        self.step = self.saved = step
