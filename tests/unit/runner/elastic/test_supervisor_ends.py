"""The end of an elastic job: every host's agent is told, also where one leaves the list of agents at once."""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Collection, Mapping, Sequence

import pytest

from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import make_secret
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.messages import Closed, Ended, Exit, Lost, OutputData, ProcessPlan, Stopped
from horovod.runner.elastic import supervisor as elastic_supervisor
from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.decisions import StartProcess
from horovod.runner.elastic.elastic_policy import ElasticPolicy
from horovod.runner.elastic.job_state import JobState, Limits
from horovod.runner.elastic.supervisor import ElasticSupervisor
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.output.outcome import Outcome
from horovod.runner.output.output import JobOutput, StreamSink
from horovod.runner.supervisor import Plans

HOSTS = [HostInfo(f"host{number}", 1) for number in range(4)]


class PromptAgent(Agent):
    """Says that it has ended while it is told to end, as the launcher's own does when nothing is left to end.

    Args:
        finishes: whether its processes end by themselves.
        lost: whether it is lost instead.
    """

    def __init__(self, host: str, loop: Loop, report: Report, *, finishes: bool, lost: bool = False) -> None:
        super().__init__((host,))
        self.facts = HostFacts("python", 1, (), None)
        self.ends: list[bool] = []
        self.released = False
        self._lost = lost
        self._loop = loop
        self._report = report
        self._finishes = finishes
        self._numbers: list[int] = []

    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        self._numbers += [plan.number for plan in plans]
        if self._lost:
            self._loop.after(self, 0.01, self._lose)
        elif self._finishes:
            self._loop.after(self, 0.01, lambda: self._finish(Exit(0)))

    def _lose(self) -> None:
        self.closed = self.unheard = True
        self._report(self, Lost("it is lost"))

    def _finish(self, end: Exit) -> None:
        for number in self._numbers:
            for stream in ("stdout", "stderr"):
                self._report(self, OutputData(number, stream, b""))
            self._report(self, Ended(number, end))
        self._numbers.clear()

    def signal(self, number: int, processes: Collection[int]) -> None:
        pass

    def look(self) -> None:
        self._report(self, Stopped([]))

    def feed(self, process: int, data: bytes) -> None:
        pass

    def end(self, grace: float, *, hunt: bool) -> None:
        if not self.closed:
            self.ends.append(hunt)
            self._finish(Exit(143, signal.SIGTERM))
            self.closed = True
            self._report(self, Closed([]))

    def kill(self) -> None:
        self.closed = self.released = True


@pytest.mark.parametrize("cancelled", [False, True], ids=["all ranks have ended", "the launcher is asked to end"])
def test_each_agent_is_told_to_end_though_the_one_before_it_leaves_at_once(cancelled: bool) -> None:
    agents, outcome = play(cancelled=cancelled)
    assert [agent.ends for agent in agents] == [[cancelled]] * len(HOSTS)
    assert not outcome.unheard and outcome.interrupted == (signal.SIGTERM if cancelled else 0)


@pytest.mark.parametrize("seconds", [3600.0, 0.0], ids=["a moment ago", "long ago"])
def test_a_lost_agent_is_named_at_the_end_only_if_processes_may_remain(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(elastic_supervisor, "UNHEARD_SECONDS", seconds)
    agents, outcome = play(lost="host1")
    assert outcome.unheard == (["host1"] if seconds else [])
    assert agents[1].released and not agents[1].ends and all(agent.ends for agent in agents if agent is not agents[1])


class LauncherIsTerminated:
    """Stands in for the signals that a launcher gets."""

    may_raise = passes_interrupts_on = pressed = False

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()

    def fileno(self) -> int:
        return self._reader.fileno()

    def terminate(self) -> None:
        self._writer.send(b".")

    def take(self) -> list[int]:
        self._reader.recv(1)
        return [signal.SIGTERM]

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def play(cancelled: bool = False, lost: str = "") -> tuple[list[PromptAgent], Outcome]:
    """A job with one process on each host: they end, or the launcher is asked to end, or one host's agent is lost."""
    loop = Loop()
    said = io.StringIO()
    output = JobOutput(StreamSink(io.StringIO()), StreamSink(said), len(HOSTS), None, timestamps=False)
    seconds = 1.0 if lost else 60.0  # nothing takes the assignment of what is lost
    limits = Limits(start=4, least=4, most=None, resets=None, patience=seconds, starting=seconds, fixed=True)
    policy = ElasticPolicy(JobState(limits, Blacklist(None)))
    server = RendezvousServer(make_secret(), "127.0.0.1")
    agents: list[PromptAgent] = []
    signals = LauncherIsTerminated()

    def reach(host: HostInfo) -> Agent:
        name, finishes = host.hostname, not (cancelled or lost)
        agents.append(PromptAgent(name, loop, supervisor.report, finishes=finishes, lost=name == lost))
        return agents[-1]

    def plan(agent: Agent, start: StartProcess) -> Plans:
        return {}, [ProcessPlan(start.number, ("true",), {}, False)]

    supervisor = ElasticSupervisor(
        loop, output, policy, server, reach=reach, plan=plan, seconds=60.0, signals=signals  # type: ignore[arg-type]
    )  # fmt: skip
    if cancelled:
        loop.after("cancel", 0.01, signals.terminate)
    try:
        outcome = supervisor.run_elastic(HOSTS)
    finally:
        loop.close()
        server.stop()
        signals.close()
    return agents, outcome
