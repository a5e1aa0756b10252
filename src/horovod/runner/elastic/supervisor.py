"""Supervises an elastic job from its first process to its last: passes events to the policy, and carries out its decisions."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from horovod.control import elastic_messages as messages
from horovod.control.elastic_messages import (
    HostsChanged,
    News,
    NoRank,
    RankAssignment,
    ReadyForRound,
    RoundOver,
    WorkerMessage,
)
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.wakeup import WakeUp
from horovod.runner.agent.base import Agent
from horovod.runner.agent.grace_period import GRACE_SECONDS
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import AgentEvent, AgentReady, Closed, Exit, NotStarted, Refused, Signalled
from horovod.runner.children import owned
from horovod.runner.elastic.decisions import (
    BeginRound,
    Dismiss,
    EndRound,
    KillProcess,
    NotifyHostsChanged,
    StartProcess,
    StopProcess,
)
from horovod.runner.elastic.discovery import Found
from horovod.runner.elastic.elastic_policy import ElasticPolicy
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.output.outcome import UNHEARD_SECONDS, Outcome
from horovod.runner.output.output import JobOutput
from horovod.runner.policy import Decisions, EndAll
from horovod.runner.signals import SignalPipe
from horovod.runner.supervisor import Plans, Supervisor


class ElasticSupervisor(Supervisor):
    """The processes of an elastic job.

    Args:
        server: the rendezvous server through which processes report to this launcher, and wait for its answers. It must not
            have been started.
        reach: returns the agent of a host; called once for each host, and again after its agent was lost.
        plan: returns what to start on a host whose agent is ready.
        seconds: how long an agent may take to get ready.
    """

    def __init__(
        self,
        loop: Loop,
        output: JobOutput,
        policy: ElasticPolicy,
        server: RendezvousServer,
        *,
        reach: Callable[[HostInfo], Agent],
        plan: Callable[[Agent, StartProcess], Plans],
        seconds: float,
        signals: SignalPipe | None,
    ) -> None:
        self._process_locations: dict[int, str] = {}
        super().__init__(
            loop,
            output,
            policy,
            locations=self._process_locations,
            reported_failure=lambda: None,
            departed=lambda *_: None,
            signals=signals,
        )
        self._elastic = policy
        self._server = server
        self._reach = reach
        self._plan = plan
        self._seconds = seconds
        self._by_host: dict[str, Agent] = {}
        self._to_start: dict[Agent, list[StartProcess]] = {}  # until the agent is ready
        self._hosts: set[str] = set()
        self._lost: dict[str, float] = {}  # when the agent of a host was lost
        self._questions: dict[int, int] = {}  # the last question of each process
        self._news: list[int] = [0, 0]  # a round, and how many messages to its ranks there are
        self._decided: deque[tuple[object, ...]] = deque()
        self._carrying_out = False
        self._lock = threading.Lock()
        self._received: list[tuple[int, WorkerMessage]] = []
        self._wake_up = WakeUp()
        loop.watch(self._wake_up.fileno(), self._on_wake_up)
        server.pass_on(messages.MESSAGES, self._hear)

    def run_elastic(self, hosts: Sequence[HostInfo]) -> Outcome:
        """Run the job to its end.

        Args:
            hosts: the hosts that are available at the start.

        Raises:
            SecondSignal: a second signal came; everything has been killed.
        """
        try:
            return self._supervise(lambda: self.hosts_found(hosts))
        finally:
            self._loop.unwatch(self._wake_up.fileno())
            self._wake_up.close()

    def hosts_found(self, found: Found) -> None:
        """The hosts that are available now, or why they are not known."""
        if isinstance(found, str):
            self._output.say(f"horovodrun: {found}; continuing with the previous hosts")
            return
        self._hosts = {host.hostname for host in found}
        self._do(self._elastic.hosts_found(found))
        self._release_hosts()

    def report(self, agent: Agent, event: AgentEvent) -> None:
        if isinstance(event, NotStarted):
            self._on_end(event.process, Exit(255, reason=event.reason))
        elif isinstance(event, AgentReady):
            self._loop.cancel(("agent", agent))
            for start in self._to_start.pop(agent, []):
                self._start_process(agent, start)
        elif isinstance(event, Refused):
            self._on_lost(agent, f"host {agent.name} cannot take part: {event.reason}")
        elif isinstance(event, Signalled):  # the agent ends what runs on its host; the other hosts continue
            self._do(self._elastic.host_signalled(agent.hosts, event.number))
        else:
            super().report(agent, event)
            if isinstance(event, Closed):
                if self._elastic.ending:
                    self._forget_agent(agent)
                else:  # the agent will report nothing more about its processes
                    self._on_lost(agent, f"the agent of {agent.name} has ended")

    # Reports of the server, the agents and the loop.

    def _hear(self, key: str, value: bytes) -> None:
        """Take a message of a process. Runs on the server's thread."""
        number = key.removeprefix(messages.MESSAGES)
        try:
            message = messages.decode_message(value)
        except msgspec.DecodeError:
            return  # not written by the runtime of this version
        if number.isdecimal():
            with self._lock:
                self._received.append((int(number), message))
            self._wake_up.set()

    def _on_wake_up(self) -> None:
        self._wake_up.clear()
        self._take_messages()

    def _take_messages(self) -> None:
        with self._lock:
            received, self._received = self._received, []
        for number, each in received:
            if isinstance(each, ReadyForRound) and number in self._elastic.running:
                self._forget_answer(number)
                self._questions[number] = each.question
            self._do(self._elastic.on_message(number, each))

    def _on_end(self, number: int, end: Exit) -> None:
        self._take_messages()  # the process sent its messages before it ended
        self._home.pop(number, None)
        self._forget_answer(number)
        super()._on_end(number, end)
        self._release_hosts()

    def _on_lost(self, agent: Agent, reason: str) -> None:
        self._loop.cancel(("agent", agent))
        waiting = self._to_start.pop(agent, [])
        self._forget_agent(agent)
        for start in waiting:
            self._on_end(start.number, Exit(255, reason=reason))
        super()._on_lost(agent, reason)

    def _on_no_answer(self, agent: Agent) -> None:
        agent.kill()
        self._on_lost(agent, f"host {agent.name} has not answered within {self._seconds:.3g} seconds")

    # How decisions are carried out.

    def _do(self, decisions: Decisions) -> None:
        """Carry out decisions in their order, also if carrying out one leads to others."""
        self._decided.extend(decisions)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._decided:
                self._carry_out(self._decided.popleft())
        finally:
            self._carrying_out = False

    def _carry_out(self, decision: tuple[object, ...]) -> None:
        if isinstance(decision, StartProcess):
            self._start_on_host(decision)
        elif isinstance(decision, BeginRound):
            self._begin(decision)
        elif isinstance(decision, NotifyHostsChanged):
            self._tell_round(decision.round, HostsChanged(int(decision.result)))
        elif isinstance(decision, EndRound):
            self._server.end_rounds(decision.round, decision.reason)
            self._tell_round(decision.round, RoundOver(decision.reason))
        elif isinstance(decision, Dismiss):
            key = messages.answer_key(decision.number, decision.question)
            self._server.put(key, messages.encode(NoRank(decision.reason, decision.job_ends)))
        elif isinstance(decision, StopProcess):
            self._signal(decision.number, signal.SIGTERM)
            kill = partial(self._signal, decision.number, signal.SIGKILL)
            self._loop.after(("stop", decision.number), GRACE_SECONDS, kill)
        elif isinstance(decision, KillProcess):
            self._signal(decision.number, signal.SIGKILL)
        else:
            if isinstance(decision, EndAll):
                self._server.put(messages.ENDING, b"")
            super()._carry_out(decision)

    def _start_on_host(self, start: StartProcess) -> None:
        name = start.host.hostname
        self._process_locations[start.number] = f"on {name}"
        agent = self._by_host.get(name)
        if agent is None:
            try:
                agent = owned(self._reach_host, start.host)
            except (LaunchError, ValueError) as error:
                self._on_end(start.number, Exit(255, reason=str(error)))
                return
        if agent.facts is not None:
            self._start_process(agent, start)
            return
        if agent not in self._to_start:
            self._loop.after(("agent", agent), self._seconds, partial(self._on_no_answer, agent))
        self._to_start.setdefault(agent, []).append(start)

    def _reach_host(self, host: HostInfo) -> Agent:
        agent = self._by_host[host.hostname] = self._reach(host)
        if agent not in self._agents:
            self._agents.append(agent)
        return agent

    def _start_process(self, agent: Agent, start: StartProcess) -> None:
        if start.number not in self._elastic.running:
            return  # the process was given up before its host was ready
        try:
            self._start(agent, *self._plan(agent, start))
        except LaunchError as error:
            self._on_end(start.number, Exit(255, reason=str(error)))

    def _begin(self, begin: BeginRound) -> None:
        for number in range(self._news[1]):
            self._server.forget(messages.news_key(self._news[0], number))
        self._server.forget_all(messages.STORES)
        self._news = [begin.round, 0]
        running = self._elastic.running
        for number in [each for each in self._process_locations if each not in running]:
            del self._process_locations[number]
            self._tails.pop(number, None)
        for number, question, slot in begin.assignments:
            assignment = RankAssignment(
                begin.round, slot.rank, slot.size, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size,
                begin.same_state, begin.in_run, list(begin.lost),
            )  # fmt: skip
            self._server.put(messages.answer_key(number, question), messages.encode(assignment))

    def _tell_round(self, number: int, news: News) -> None:
        if number == self._news[0]:
            self._server.put(messages.news_key(number, self._news[1]), messages.encode(news))
            self._news[1] += 1

    def _signal(self, number: int, signal_number: int) -> None:
        agent = self._home.get(number)
        if agent is not None:
            agent.signal(signal_number, [number])
            if signal_number == signal.SIGKILL:
                agent.signal(signal.SIGCONT, [number])
        elif number in self._elastic.running and signal_number == signal.SIGTERM:  # the host is not ready yet
            for starts in self._to_start.values():
                starts[:] = [start for start in starts if start.number != number]
            self._on_end(number, Exit(0))

    def _forget_answer(self, number: int) -> None:
        question = self._questions.pop(number, None)
        if question is not None:
            self._server.forget(messages.answer_key(number, question))
        self._loop.cancel(("stop", number))

    def _release_hosts(self) -> None:
        """End the agents of hosts that are withdrawn, once nothing runs there."""
        for name, agent in list(self._by_host.items()):
            busy = agent in self._to_start or agent in self._home.values()
            if not busy and not self._hosts.intersection(agent.hosts) and name not in self._hosts:
                del self._by_host[name]
                # The agent of the launcher's host is kept: it is not a process of its own, and the host may come back.
                remote = not isinstance(agent, LocalAgent)
                if remote and agent not in self._by_host.values() and not self._elastic.ending:
                    agent.end(GRACE_SECONDS, hunt=False)

    def _forget_agent(self, agent: Agent) -> None:
        for name in [name for name, each in self._by_host.items() if each is agent]:
            del self._by_host[name]
        if agent.closed and agent in self._agents:
            agent.kill()
            self._agents.remove(agent)
            if agent.unheard:
                self._lost[agent.name] = time.monotonic()

    def _outcome(self) -> Outcome:
        outcome, since = super()._outcome(), time.monotonic() - UNHEARD_SECONDS
        lost = [name for name, when in self._lost.items() if when > since]
        unheard = list(dict.fromkeys([*lost, *outcome.unheard]))
        survived = self._elastic.survived
        return dataclasses.replace(
            outcome, stopped=self._elastic.stopped, called="process", unheard=unheard, survived=survived
        )
