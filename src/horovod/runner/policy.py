"""Decides what a launcher does about the events of a job. Pure: events in, decisions out, no I/O and no clock.

A policy does not see output. Time passes for it only through :class:`Wake`.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from horovod.control.processes import STOPPED
from horovod.runner.agent.grace_period import GRACE_SECONDS
from horovod.runner.agent.messages import Exit
from horovod.runner.output.outcome import ReportedFailure

_REPORTED_SECONDS = 1.0
"""How long a rank that others have reported as failed may take to end by itself before all ranks are ended."""
_FINAL_OUTPUT_SECONDS = 1.0
"""How long ranks that still run may take, after the first failure, to end by themselves: the runtime has reported the failure
to them, so they raise, print where they were, and release what they hold."""
_INTERRUPT_SECONDS = 1.0
"""If the rank that Ctrl-C went to ends within this time, Ctrl-C was meant for the job, or came too late for the rank."""
_INTERRUPT = "interrupt"


class Say(NamedTuple):
    """Tell the user."""

    text: str


class Wake(NamedTuple):
    """Call :meth:`Policy.woken` with this reason, once, after this number of seconds."""

    reason: str
    seconds: float


class EndAll(NamedTuple):
    """Ask all processes to end, kill those that still run ``grace`` seconds later, and end the job."""

    grace: float


class LookAtAll(NamedTuple):
    """Have the agents report which processes are stopped, and call :meth:`Policy.looked`; before that, :meth:`Policy.ended` for
    every process that has ended."""


Decision = Say | Wake | LookAtAll | EndAll
"""The decisions of every policy."""
Decisions = Sequence[tuple[object, ...]]
"""The decisions of one policy, which may have further kinds."""


class FirstFailure(NamedTuple):
    """Which rank failed first."""

    culprit: int
    """That rank."""
    ended: int
    """The rank whose exit is reported: the culprit, or the first rank that failed because of it."""
    exit: Exit
    reason: str
    """The runtime's reason for the failure."""


class Policy(ABC):
    """Shared by all kinds of jobs: the reaction to a user who ends the job.

    Args:
        reader: the process that reads standard input, or None.
        batch_job: the batch system's name of the job that the launcher runs in; "" if there is none.

    Attributes:
        exits: how processes ended, by number.
        first_failure: which process failed first; None if none has.
        interrupted: the signal that asked the launcher to end, or 0.
        ending: whether the job has been asked to end.
    """

    def __init__(self, reader: int | None, batch_job: str = "") -> None:
        self._reader = reader
        self._batch_job = batch_job
        self._interrupt_passed_on = False
        self._just_interrupted = False  # within the last _INTERRUPT_SECONDS
        self.exits: dict[int, Exit] = {}
        self.first_failure: FirstFailure | None = None
        self.interrupted = 0
        self.ending = False

    @property
    @abstractmethod
    def running(self) -> frozenset[int]:
        """Processes that have not ended."""

    @property
    @abstractmethod
    def undecided(self) -> bool:
        """Whether the job continues even if none of its processes runs."""

    @abstractmethod
    def ended(self, number: int, end: Exit, reported: ReportedFailure | None) -> Decisions:
        """A process has ended.

        Args:
            number: the number of the process; in a static job its rank.
            end: how it ended.
            reported: what the runtime of any rank has reported about the first failure so far.
        """

    @abstractmethod
    def woken(self, reason: str, reported: ReportedFailure | None) -> Decisions:
        """The time of a :class:`Wake` is over."""

    def looked(self, stopped: Collection[int], reported: ReportedFailure | None) -> Decisions:
        """All agents have reported which processes are stopped, or have had the time for it."""
        return []

    def signalled(self, number: int) -> list[Decision]:
        """A signal has asked the launcher, or one of its agents, to end."""
        if self.interrupted:
            return []
        self.interrupted = number
        name = signal.Signals(number).name
        if self._batch_job and number == signal.SIGTERM:
            name += f", as when {self._batch_job} is cancelled or reaches its time limit"
        return [Say(f"horovodrun: {name}: ending the job"), *self._end_all()]

    def reader_gone(self) -> list[Decision]:
        """The reader of the job's output has closed it."""
        if self.interrupted:
            return []
        self.interrupted = signal.SIGPIPE
        return self._end_all()

    def interrupt_passed_on(self) -> list[Decision]:
        """Ctrl-C went to the rank that reads from the terminal, because it may mean that rank."""
        first, self._interrupt_passed_on = not self._interrupt_passed_on, True
        self._just_interrupted = True
        settled = Wake(_INTERRUPT, _INTERRUPT_SECONDS)
        if not first:
            return [settled]
        return [
            Say(
                f"horovodrun: Ctrl-C went to rank {self._reader}, which reads from this terminal; press it twice within a "
                "second to end the job"
            ),
            settled,
        ]

    def _end_all(self) -> list[Decision]:
        if self.ending:
            return []
        self.ending = True
        return [EndAll(GRACE_SECONDS)]


class StaticPolicy(Policy):
    """The job of a fixed set of ranks: it ends when all have ended, or soon after the first has failed.

    Args:
        ranks: the ranks that will be started.
        reader: the rank that reads standard input, or None.
        batch_job: the batch system's name of the job that the launcher runs in; "" if there is none.
    """

    def __init__(self, ranks: Collection[int], reader: int | None, batch_job: str = "") -> None:
        super().__init__(reader, batch_job)
        self._running = set(ranks)
        self._first_failed: int | None = None  # the first rank that ended with an exit code other than 0
        self._stopped: Collection[int] | None = (
            None  # ranks that were stopped when the first failed; None: not known yet
        )
        self._waits = False  # for a rank that was reported to end by itself

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    @property
    def undecided(self) -> bool:
        # The policy waits a moment before it decides which rank failed first.
        return self._first_failed is not None and self.first_failure is None and not self.ending

    def ended(self, rank: int, end: Exit, reported: ReportedFailure | None) -> list[Decision]:
        self._running.discard(rank)
        self.exits[rank] = end
        if self.ending:
            return []
        if rank == self._reader and self._interrupt_ended_it(end):
            self.interrupted = signal.SIGINT
            return self._end_all()
        if self.first_failure is not None:  # this rank has ended because of it
            return [] if self._running else self._end_all()
        if end.code and self._first_failed is None:
            self._first_failed = rank
            return [LookAtAll()]
        return self._name_first_failure(reported, wait_for_it=True)

    def looked(self, stopped: Collection[int], reported: ReportedFailure | None) -> list[Decision]:
        if self.ending or self.first_failure is not None:
            return []
        self._stopped = stopped
        return self._name_first_failure(reported, wait_for_it=True)

    def _interrupt_ended_it(self, end: Exit) -> bool:
        """Whether the job ends with its reader: Ctrl-C ended the reader, or came when it was ending while others run."""
        if self._just_interrupted and self._running:
            return True
        return self._interrupt_passed_on and end.code == 128 + signal.SIGINT

    def woken(self, reason: str, reported: ReportedFailure | None) -> list[Decision]:
        if reason == _INTERRUPT:
            self._just_interrupted = False
        if self.ending:
            return []
        if reason == "reported" and self.first_failure is None:
            return self._name_first_failure(reported, wait_for_it=False)
        return self._end_all() if reason == "final output" else []

    def _name_first_failure(self, reported: ReportedFailure | None, wait_for_it: bool) -> list[Decision]:
        """Decide which rank failed first: a rank that fails because of another may end before that one."""
        if self._first_failed is None or self._stopped is None:
            return []
        culprit, reason = self._culprit(self._first_failed, self._stopped, reported)
        # No rank sends SIGTERM to another. A batch system that ends a job sends it to all processes, this launcher included.
        terminated = self.exits[self._first_failed].signal == signal.SIGTERM
        may_end = culprit in self._running and culprit not in self._stopped
        if wait_for_it and (may_end or terminated):
            first, self._waits = not self._waits, True
            return [Wake("reported", _REPORTED_SECONDS)] if first else []
        # A culprit that still runs, or that ended with 0, has no exit code to pass on; its first victim has.
        own = self.exits.get(culprit)
        ended = culprit if own is not None and own.code else self._first_failed
        self.first_failure = FirstFailure(culprit, ended, self.exits[ended], reason)
        message = f"horovodrun: Process {ended} exit with status code {self.exits[ended]}."
        if ended != culprit:
            message += f" Rank {culprit} failed first."
        others = len(self._running)
        if others:
            message += f" Terminating the {others} rank{'s' * (others > 1)} that still run{'s' * (others == 1)}."
            return [Say(message), Wake("final output", _FINAL_OUTPUT_SECONDS)]
        return [Say(message), *self._end_all()]

    def _culprit(self, failed: int, stopped: Collection[int], reported: ReportedFailure | None) -> tuple[int, str]:
        """The rank that failed first, and the reason if the exit does not say it.

        What ranks say of each other is less certain than what the launcher sees: no failure of another rank stops a process,
        or ends it by SIGKILL.

        Args:
            failed: the first rank that ended with an exit code other than 0.
        """
        known = reported if reported and (reported.rank in self._running or reported.rank in self.exits) else None
        killed = [rank for rank, end in self.exits.items() if end.signal == signal.SIGKILL]
        seen = [*killed, *sorted(stopped)]
        if known is not None and (known.own or known.rank in seen or not seen):
            return known.rank, known.reason
        culprit = seen[0] if seen else failed
        return culprit, STOPPED if culprit in stopped else ""
