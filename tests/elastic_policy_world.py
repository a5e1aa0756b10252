"""Plays the processes of an elastic job for tests of the launcher's policy: they do what a test says."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from horovod.control.elastic_messages import Connected, HostUpdateResult, ReadyForRound
from horovod.runner.agent.messages import Exit
from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.decisions import (
    BeginRound,
    Dismiss,
    EndRound,
    KillProcess,
    NotifyHostsChanged,
    StartProcess,
    StopProcess,
)
from horovod.runner.elastic.elastic_policy import ElasticPolicy
from horovod.runner.elastic.job_state import JobState, Limits
from horovod.runner.hosts.slots import HostInfo, SlotInfo
from horovod.runner.policy import Say, Wake

KILLED = Exit(137, signal.SIGKILL)


class PolicyWorld:
    """Plays the processes of a job: they do what the policy says, when the test lets them."""

    def __init__(
        self,
        hosts: dict[str, int],
        least: int = 1,
        most: int | None = None,
        start: int | None = None,
        resets: int | None = None,
        cooldown: tuple[int, int] | None = None,
        fixed: bool = False,
        continues: bool = False,
        attached: bool = False,
    ) -> None:
        limits = Limits(start or least, least, most, resets, 600.0, 30.0, fixed, continues, attached, continues)
        self.policy = ElasticPolicy(JobState(limits, Blacklist(cooldown, lambda: 0.5)))
        self.alive: dict[int, str] = {}
        self.asked: dict[int, int] = {}
        self.assignments: dict[int, SlotInfo] = {}  # of those in the round that runs
        self.announced = HostUpdateResult.no_update
        self.timers: dict[str, float] = {}
        self.said = ""
        self.dismissed: dict[int, bool] = {}
        self.reasons: dict[int, str] = {}
        self.ended_rounds: list[int] = []
        self.have_state: set[int] = set()
        self.in_run: set[int] = set()
        self.killed: list[int] = []  # by the launcher
        self.same_state = False
        self.named: Sequence[str] = ()  # the lost ranks that the ranks of the round are told
        self.collectives: dict[int, str] = {}  # by process, what the next failure ends there
        self.cut: tuple[tuple[int, int], ...] = ()  # ranks whose hosts could not reach each other in the last round
        self.hosts(hosts)

    def hosts(self, hosts: dict[str, int]) -> None:
        self.do(self.policy.hosts_found([HostInfo(name, slots) for name, slots in hosts.items()]))

    def do(self, decisions: Sequence[object]) -> None:
        for decision in decisions:
            if isinstance(decision, StartProcess):
                assert decision.number not in self.asked, "a number is given once"
                self.alive[decision.number] = decision.host.hostname
                self.asked[decision.number] = -1
            elif isinstance(decision, BeginRound):
                self.assignments = {number: slot for number, _, slot in decision.assignments}
                self.announced = HostUpdateResult.no_update
                self.same_state = decision.same_state
                self.named = decision.lost
                assert all(number in self.alive for number in self.assignments)
                assert all(self.asked[number] == question for number, question, _ in decision.assignments)
            elif isinstance(decision, NotifyHostsChanged):
                self.announced |= decision.result
            elif isinstance(decision, EndRound):
                self.ended_rounds.append(decision.round)
            elif isinstance(decision, Dismiss):
                self.dismissed[decision.number] = decision.job_ends
                self.reasons[decision.number] = decision.reason
            elif isinstance(decision, Wake):
                self.timers[decision.reason] = decision.seconds
            elif isinstance(decision, Say):
                self.said += decision.text + "\n"
            elif isinstance(decision, StopProcess | KillProcess):
                self.killed.append(decision.number)
                self.end(decision.number, KILLED)

    def ready(self, *numbers: int, failed: bool = False, keep: bool = False) -> None:
        """These processes have left the round, if they were in one, and wait for the next.

        Args:
            keep: whether they have stopped at a check with the state that all have.
        """
        for number in numbers:
            before = self.policy.round if number in self.assignments else 0
            self.asked[number] += 1
            self.assignments.pop(number, None)
            has_state = number in self.have_state
            line = "train.py:7" if failed else ""
            ready = ReadyForRound(
                self.asked[number], before, failed, "why", has_state=has_state, keeps_state=keep, line=line,
                in_run=number in self.in_run, collective=self.collectives.get(number, "") if failed else "",
                cut=self.cut,
            )  # fmt: skip
            self.do(self.policy.on_message(number, ready))

    def connect(self) -> None:
        """The runtimes of the round run, and the states are synchronised."""
        self.have_state |= set(self.assignments)
        for number in self.assignments:
            self.do(self.policy.on_message(number, Connected(self.policy.round)))

    def begin(self) -> None:
        """All that are alive get ready, and their runtimes run."""
        self.ready(*sorted(self.alive))
        self.connect()

    def end(self, number: int, end: Exit = KILLED) -> None:
        del self.alive[number]
        self.assignments.pop(number, None)
        self.do(self.policy.ended(number, end))

    def wake(self, reason: str) -> None:
        del self.timers[reason]
        self.do(self.policy.woken(reason))

    def ranks(self) -> list[int]:
        """The processes of the round that runs, by rank."""
        return sorted(self.assignments, key=lambda number: self.assignments[number].rank)
