"""Decides from pings, answers and reports which rank is lost. Pure: time and events are passed in.

A rank that does not answer is not always lost. Code that holds Python's interpreter lock (a large pickle, native code of a
library) keeps its liveness monitor from running. The other ranks wait for this rank as long as one of them sees its process
run, unless the user has set a limit. A rank is lost

- if its process is seen stopped :data:`CONFIRMING_LOOKS` times in a row, or has ended;
- if no other rank can see its process, and it has not answered for :data:`UNSEEN_CHECKS` checks;
- if its host has vanished: the kernel breaks the connection.

A rank that answers but makes no progress in a collective is stuck. It is blamed after :data:`NO_PROGRESS_REPORTS` reports of
one wait, if all ranks have answered all pings in time meanwhile: otherwise it may be waiting for a rank that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from horovod._base.config import STALL_SHUTDOWN_TIME
from horovod.control.failure import LOST, TIME_LIMIT, Cause

NO_PROGRESS_REPORTS = 3
"""After how many reports of no progress in one wait a peer is blamed."""

CONFIRMING_LOOKS = 2
"""How many checks in a row must find a process stopped. When a whole job is resumed, its processes resume one by one."""

UNSEEN_CHECKS = 30
"""After how many unanswered checks a rank is lost whose process no other rank can see. Three checks take one timeout, so this
is ten times the timeout."""

SUSPICIOUS_CHECKS = 2
"""The same number while a rank is suspected to have failed."""

UNRESPONSIVE = (
    "it no longer answers: its process is stopped, starved or swapped out, or its host is unreachable. No other "
    "rank on its host answers, so the cause is not known"
)

UNABLE = (
    f"it has not answered for longer than {{:g}} seconds ({STALL_SHUTDOWN_TIME}) although its process runs: "
    "something in it holds Python's interpreter lock, or the machine is short of processor time or memory"
)

STUCK = "{} although it answers: py-spy dump --pid with its process id shows where its thread horovod-worker is"


class Suspect(NamedTuple):
    """A rank that has failed, or seems to have."""

    rank: int
    reason: str
    cause: Cause = LOST


@dataclass(slots=True)
class _Question:
    """A ping that has not been answered yet.

    Attributes:
        asked: when it was sent.
        due: when to check next why there is no answer.
        looking: ranks were asked to inspect the process, and none has answered yet.
        checks: how often they were asked since the process was last seen running.
        stops: how often in a row the process was seen stopped.
        runs: how often the process was seen running.
        tell: when to warn again that the rank does not answer although its process runs.
    """

    asked: float
    due: float
    looking: bool = False
    checks: int = 0
    stops: int = 0
    runs: int = 0
    tell: float = 0.0


class FailureDetector:
    """One liveness monitor's knowledge of the peers that it pings. All times are in seconds of one monotonic clock.

    Args:
        answer_seconds: how long an answer may take before the peer's process is inspected.
        longest_seconds: how long a rank may stay silent before it counts as lost although its process runs; 0: no limit.

    Attributes:
        failure: the rank that failed first and the reason, once that is known.
    """

    def __init__(self, answer_seconds: float, longest_seconds: float = 0) -> None:
        self._answer_seconds = answer_seconds
        self._longest_seconds = longest_seconds
        self._questions: dict[int, _Question] = {}
        self._late = False
        self._no_progress: dict[tuple[int, int], str] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._suspicion: Suspect | None = None
        self.failure: Suspect | None = None

    def due(self) -> float | None:
        """When to call :meth:`overdue` next; None: not before the next ping."""
        return min((question.due for question in self._questions.values()), default=None)

    def close(self) -> None:
        """Forget all pings, because no more will be sent."""
        self._questions.clear()
        self._suspicion = None

    # Pings

    def ask(self, peers: Iterable[int], now: float) -> list[int]:
        """The peers to ping now: those without an unanswered ping."""
        fresh = [peer for peer in peers if peer not in self._questions]
        for peer in fresh:
            self._questions[peer] = _Question(now, now + self._answer_seconds)
        self._settle()
        return fresh

    def answered(self, peer: int, now: float) -> None:
        """A peer has answered."""
        question = self._questions.pop(peer, None)
        if question is not None:
            self._late |= now - question.asked > self._answer_seconds / 2
            self._settle()

    def waits_for(self, peer: int) -> bool:
        """Whether a peer owes an answer."""
        return peer in self._questions

    def left(self, peer: int) -> None:
        """A peer has left and answers no more."""
        if self._questions.pop(peer, None) is not None:
            self._settle()

    def overdue(self, now: float) -> list[int]:
        """The peers whose answers are overdue. The caller has their processes inspected, and calls :meth:`process_seen`."""
        late = [peer for peer, question in self._questions.items() if now >= question.due]
        for peer in late:
            question = self._questions[peer]
            question.due = now + self._answer_seconds
            question.looking = True
            question.checks += 1
            limit = UNSEEN_CHECKS if self._suspicion is None else SUSPICIOUS_CHECKS
            if not question.stops and question.checks >= limit:
                self._blame(peer, UNRESPONSIVE)
        return late

    def process_seen(self, peer: int, lost: str, now: float) -> float | None:
        """Record what a rank has seen of the process of an unresponsive peer.

        Args:
            peer: the unresponsive rank.
            lost: why the peer cannot answer; "" if its process runs.

        Returns:
            If a warning is due, for how many seconds the peer has not answered although its process runs; otherwise None. A
            warning is due the first time, and whenever this time has doubled.
        """
        question = self._questions.get(peer)
        if question is None or not question.looking:
            return None  # it has answered meanwhile, or another rank has reported
        question.looking = False
        if lost:
            question.stops += 1
            question.due = min(question.due, now + self._answer_seconds / 2)
            if question.stops >= CONFIRMING_LOOKS:
                self._blame(peer, lost)
            return None
        question.runs, question.checks, question.stops = question.runs + 1, 0, 0
        if 0 < self._longest_seconds <= question.runs * self._answer_seconds:
            self._blame(peer, UNABLE.format(self._longest_seconds), TIME_LIMIT)
        self._settle()
        if now < question.tell:
            return None
        unanswered = now - question.asked
        question.tell = now + unanswered
        return unanswered

    # Reports

    def suspect(self, rank: int, reason: str, cause: Cause = LOST) -> None:
        """``rank`` seems to have failed. It is blamed unless another rank does not answer."""
        if self._suspicion is None:
            self._suspicion = Suspect(rank, reason, cause)

    def report_no_progress(self, reporter: int, rank: int, reason: str, times: int) -> None:
        """``reporter`` has seen no progress of ``rank`` in a collective, for the n-th time in one wait."""
        if times <= 1:
            self._counts.pop((reporter, rank), None)
        self._no_progress[reporter, rank] = reason

    def _settle(self) -> None:
        """Blame a rank if all ranks that can answer have answered."""
        if self._suspicion is not None and all(question.runs for question in self._questions.values()):
            self._blame(*self._suspicion)
        if self._questions:
            return
        if self._late:
            self._counts.clear()
        else:
            for key, reason in self._no_progress.items():
                self._counts[key] = self._counts.get(key, 0) + 1
                if self._counts[key] >= NO_PROGRESS_REPORTS:
                    self._blame(key[1], STUCK.format(reason), TIME_LIMIT)
        self._no_progress.clear()
        self._late = False

    def _blame(self, rank: int, reason: str, cause: Cause = LOST) -> None:
        if self.failure is None:
            self.failure = Suspect(rank, reason, cause)
