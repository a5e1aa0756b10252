"""What the questions and answers among liveness monitors amount to: who is lost, and who is only slow. Pure: told of
time and events.

A rank that does not answer may still be well: whatever holds Python's interpreter lock (a large pickle, a library's native
code) holds up its liveness monitor as well. Such a rank is waited for, for as long as somebody sees that its process
runs, unless the user has set a limit. Else a rank is *lost* only if its process is seen to be stopped or gone, or if
nobody can see it for very long; a rank whose *host* is gone is found by the kernel, which breaks the connection.

A rank that answers and makes no progress in a collective is stuck. Its peers complain, again and again while they wait; it
takes :data:`NO_PROGRESS_REPORTS` of the same wait, and that all ranks answer at once whenever they are asked: else it
may wait for the one that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NO_PROGRESS_REPORTS = 3
"""How often a peer is complained of in one wait before it is to blame."""

CONFIRMING_LOOKS = 2
"""How often in a row a process must be seen stopped: whoever resumes a whole job does not resume its processes at once."""

UNSEEN_CHECKS = 30
"""How often a rank that nobody can see is found not to have answered before it is lost: ten times the timeout."""

SUSPICIOUS_CHECKS = 2
"""The same where something is known to have failed."""

SILENT = (
    "it does not answer any more: its process is stopped, starved or swapped out, or its host is unreachable. Nobody else runs "
    "on its host who could tell"
)

UNABLE = (
    "it has not answered for longer than {:g} seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS) although its process runs: "
    "something in it holds Python's interpreter lock, or the machine is short of processor time or memory"
)

STUCK = "{} although it answers: py-spy dump --pid with its process shows where its thread horovod-worker stands"

Suspect = tuple[int, str]
"""A rank, and the reason."""


@dataclass(slots=True)
class _Question:
    """One that has not been answered yet.

    Attributes:
        asked: when.
        due: when to find out why there is no answer.
        looking: that was asked, and nobody has told yet.
        checks: how often that was asked since somebody last saw the process run.
        stops: how often in a row it was seen stopped.
        runs: how often it was seen to run.
        tell: from when on that is worth telling again.
    """

    asked: float
    due: float
    looking: bool = False
    checks: int = 0
    stops: int = 0
    runs: int = 0
    tell: float = 0.0


class FailureDetector:
    """What one liveness monitor knows of those it asks. All times are of one monotonic clock, in seconds.

    Args:
        answer_seconds: how long an answer may take before somebody looks after the rank that owes it.
        longest_seconds: after which a rank whose process runs is lost nevertheless; 0: never.

    Attributes:
        verdict: who failed first and why, once that is clear.
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
        """When :meth:`overdue` is to be called next; None: not before the next question."""
        return min((question.due for question in self._questions.values()), default=None)

    def close(self) -> None:
        """Nothing is asked any more."""
        self._questions.clear()
        self._suspicion = None

    # Questions

    def ask(self, peers: Iterable[int], now: float) -> list[int]:
        """Which of these peers to ask now: those that owe no answer already."""
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

    def left(self, peer: int) -> None:
        """A peer has left and answers no more."""
        if self._questions.pop(peer, None) is not None:
            self._settle()

    def overdue(self, now: float) -> list[int]:
        """Who should have answered by now, so that somebody has to look after it and :meth:`testify`; again after a while."""
        late = [peer for peer, question in self._questions.items() if now >= question.due]
        for peer in late:
            question = self._questions[peer]
            question.due = now + self._answer_seconds
            question.looking = True
            question.checks += 1
            stall_timeout = UNSEEN_CHECKS if self._suspicion is None else SUSPICIOUS_CHECKS
            if not question.stops and question.checks >= stall_timeout:
                self._blame(peer, SILENT)
        return late

    def testify(self, peer: int, lost: str, now: float) -> float | None:
        """Somebody has looked at the process of a peer that does not answer.

        Args:
            lost: why it cannot answer; "" if it runs.

        Returns:
            For how many seconds it has not answered although it runs, if that is to be told to people: at first and whenever
            it has become twice as long.
        """
        question = self._questions.get(peer)
        if question is None or not question.looking:
            return None  # it has answered meanwhile, or somebody else has told
        question.looking = False
        if lost:
            question.stops += 1
            question.due = min(question.due, now + self._answer_seconds / 2)
            if question.stops >= CONFIRMING_LOOKS:
                self._blame(peer, lost)
            return None
        question.runs, question.checks, question.stops = question.runs + 1, 0, 0
        if 0 < self._longest_seconds <= question.runs * self._answer_seconds:
            self._blame(peer, UNABLE.format(self._longest_seconds))
        self._settle()
        if now < question.tell:
            return None
        silent = now - question.asked
        question.tell = now + silent
        return silent

    # Accusations

    def suspect(self, rank: int, reason: str) -> None:
        """Something has failed, perhaps because of ``rank``: it is to blame unless somebody does not answer."""
        if self._suspicion is None:
            self._suspicion = rank, reason

    def report_no_progress(self, reporter: int, rank: int, reason: str, times: int) -> None:
        """``reporter`` sees no progress of ``rank`` in a collective, for the n-th time in this wait, and waits on."""
        if times <= 1:
            self._counts.pop((reporter, rank), None)
        self._no_progress[reporter, rank] = reason

    def _settle(self) -> None:
        """Find out what follows when all who can answer have answered."""
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
                    self._blame(key[1], STUCK.format(reason))
        self._no_progress.clear()
        self._late = False

    def _blame(self, rank: int, reason: str) -> None:
        if self.failure is None:
            self.failure = rank, reason
