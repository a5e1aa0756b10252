"""Sixty-four hosts without any: agents that speak the real messages over pipes, and a launcher that believes them."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import horovod
from horovod.runner import supervisor
from horovod.runner.agent.base import Agent
from horovod.runner.agent.messages import (
    GREETING,
    AgentReady,
    Closed,
    End,
    Ended,
    Exit,
    Hello,
    NotStarted,
    OutputData,
    Prepare,
    ProcessPlan,
    Refused,
    Signalled,
    StartProcesses,
    decode_order,
    encode,
)
from horovod.runner.agent.stream import MessageStream
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.output.outcome import Outcome, ReportedFailure
from horovod.runner.output.output import JobOutput, StreamSink
from horovod.runner.policy import StaticPolicy
from horovod.runner.reach.remote import AgentConnection, RemoteAgent
from horovod.runner.supervisor import Supervisor

HOSTS, EACH = 64, 4


class ConnectionKey(AgentConnection):
    """A pipe each way, and one for what the transport says."""

    def __init__(self) -> None:
        (self.reader, self.far_writer), (self.far_reader, self.writer), (self.errors, self._far_errors) = (
            os.pipe() for _ in range(3)
        )

    def explain(self, errors: str, preamble: str) -> str:
        return "it is gone"

    def close(self, *, orderly: bool) -> None:
        os.close(self.errors)
        os.close(self._far_errors)


class FarAgent:
    """What runs on a host, as far as messages tell. By default every rank says something and ends well."""

    def __init__(self, loop: Loop, number: int, key: ConnectionKey, behaviour: Callable[[FarAgent, Any], bool]) -> None:
        self.number = number
        self.ranks: list[int] = []
        self._behaviour = behaviour
        self.congested = False
        self.on_relief: Callable[[], None] = lambda: None
        self.stream = MessageStream(
            loop,
            key.far_reader,
            key.far_writer,
            decode_order,
            self._follow,
            lambda _: self.stream.close(),
            self._on_congestion,
        )
        self.stream.write(b"Welcome!\n" + GREETING)
        self.tell(Hello(horovod.build_info()["version"], "python", 8, ["eth0"]))

    def tell(self, event: Any) -> None:
        self.stream.send(encode(event))

    def _on_congestion(self, congested: bool) -> None:
        self.congested = congested
        if not congested:
            self.on_relief()

    def finish(self, rank: int, end: Exit) -> None:
        self.tell(Ended(rank, end))
        for name in ("stdout", "stderr"):
            self.tell(OutputData(rank, name, b""))

    def _follow(self, order: Any) -> None:
        if self._behaviour(self, order):
            return
        if isinstance(order, Prepare):
            self.tell(AgentReady(("10.0.0.1", 5)))
        elif isinstance(order, StartProcesses):
            self.ranks = [plan.number for plan in order.plans]
            for rank in self.ranks:
                self.tell(OutputData(rank, "stdout", b"rank %d\n" % rank))
                self.finish(rank, Exit(0))
        elif isinstance(order, End):
            self.tell(Closed([]))


class Job:
    """A job on simulated hosts."""

    def __init__(self, behaviour: Callable[[FarAgent, Any], bool]) -> None:
        self.loop = Loop()
        self.out, self.err = io.StringIO(), io.StringIO()
        ranks = range(HOSTS * EACH)
        self.departed: list[int] = []
        self.reported: ReportedFailure | None = None
        self.supervisor = Supervisor(
            self.loop,
            JobOutput(StreamSink(self.out), StreamSink(self.err), len(ranks)),
            StaticPolicy(ranks, None),
            locations={rank: f"h{rank // EACH}, local rank {rank % EACH}" for rank in ranks},
            reported_failure=lambda: self.reported,
            departed=lambda rank, _: self.departed.append(rank),
        )
        keys = [ConnectionKey() for _ in range(HOSTS)]
        begin = Prepare("secret", "/", [("10.0.0.1", 5)], 5)
        self.agents: list[Agent] = [
            RemoteAgent(f"h{number}", self.loop, self.supervisor.report, key, begin) for number, key in enumerate(keys)
        ]
        self.far = [FarAgent(self.loop, number, key, behaviour) for number, key in enumerate(keys)]

    def run(self) -> Outcome:
        def plans() -> list[Any]:
            return [
                ({"ALL": "x"}, [ProcessPlan(host * EACH + local, ("true",), {}) for local in range(EACH)])
                for host in range(HOSTS)
            ]

        return self.supervisor.run(self.agents, plans, 20)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
        for far in self.far:
            far.stream.close()
        self.loop.close()


@pytest.fixture
def job() -> Iterator[Callable[[Callable[[FarAgent, Any], bool]], Job]]:
    made: list[Job] = []

    def make(behaviour: Callable[[FarAgent, Any], bool]) -> Job:
        made.append(Job(behaviour))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[Callable[[FarAgent, Any], bool]], Job]


def test_all_do_well(job: Make) -> None:
    made = job(lambda *_: False)
    outcome = made.run()
    assert not outcome.failed and len(outcome.exits) == HOSTS * EACH == len(made.departed)
    assert sorted(made.out.getvalue().splitlines()) == sorted(f"[{r}]<stdout>:rank {r}" for r in range(HOSTS * EACH))


def stay(far: FarAgent, order: Any) -> bool:
    """Ranks run until they are told to end."""
    if isinstance(order, StartProcesses):
        far.ranks = [plan.number for plan in order.plans]
        return True
    if isinstance(order, End):
        for rank in far.ranks:
            far.finish(rank, Exit(143, signal.SIGTERM))
    return False


def test_one_failure_among_many_ends_all_and_is_the_only_one_named(job: Make) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        handled = stay(far, order)
        if isinstance(order, StartProcesses) and far.number == 37:
            far.tell(OutputData(far.ranks[2], "stderr", b"out of luck\n"))
            far.finish(far.ranks.pop(2), Exit(9))
        return handled

    made = job(behaviour)
    outcome = made.run()
    assert (outcome.culprit, outcome.exit, outcome.tail) == (37 * EACH + 2, Exit(9), ("out of luck",))
    assert made.err.getvalue().count("exit with status code") == 1
    assert len(outcome.exits) == HOSTS * EACH


@pytest.mark.parametrize("ending", ["silently", "garbled"])
def test_a_host_that_is_lost_is_named_and_the_others_end(job: Make, ending: str) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        handled = stay(far, order)
        if isinstance(order, StartProcesses) and far.number == 5:
            if ending == "garbled":
                far.stream.write(b"\xff" * 100)
            else:
                far.stream.close()
        return handled

    outcome = job(behaviour).run()
    assert (outcome.culprit, outcome.exit.code) == (5 * EACH, 255)
    assert outcome.unheard == ["h5"]
    assert "Reason: the agent of h5 is lost: it is gone" in outcome.describe()


def test_a_signal_to_an_agent_ends_the_job_like_a_signal_to_the_launcher(job: Make) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        handled = stay(far, order)
        if isinstance(order, StartProcesses) and far.number == 5:
            far.finish(far.ranks.pop(), Exit(143, signal.SIGTERM))  # who cancels a whole job signals its ranks, too
            far.tell(Signalled(signal.SIGTERM))
        return handled

    made = job(behaviour)
    outcome = made.run()
    assert (outcome.interrupted, outcome.culprit, outcome.status) == (signal.SIGTERM, None, 143)
    assert made.err.getvalue() == "horovodrun: SIGTERM: ending the job\n"


def test_all_hosts_that_refuse_are_listed_and_nothing_starts(job: Make) -> None:
    started: list[int] = []

    def behaviour(far: FarAgent, order: Any) -> bool:
        if isinstance(order, StartProcesses):
            started.append(far.number)
        if isinstance(order, Prepare) and far.number in (3, 60):
            far.tell(Refused("no such folder"))
            return True
        return False

    made = job(behaviour)
    with pytest.raises(LaunchError) as caught:
        made.run()
    assert str(caught.value).splitlines() == [
        "2 of 64 hosts cannot take part in this job:", "  h3   no such folder", "  h60  no such folder",
    ]  # fmt: skip
    assert started == []


def test_a_host_that_is_lost_while_others_get_ready_is_listed(job: Make) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        if isinstance(order, Prepare) and far.number == 7:
            far.tell(AgentReady(("10.0.0.1", 5)))
            far.stream.close()
            return True
        if isinstance(order, Prepare) and far.number == 8:
            made.loop.after("late", 0.3, lambda: far.tell(AgentReady(("10.0.0.1", 5))))
            return True
        return False

    made = job(behaviour)
    with pytest.raises(LaunchError, match=r"1 of 64 hosts cannot take part in this job:\n  h7  it is gone"):
        made.run()


def test_a_process_that_cannot_start_ends_the_job(job: Make) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        handled = stay(far, order)
        if isinstance(order, StartProcesses) and far.number == 63:
            far.tell(NotStarted(far.ranks[0], "cannot start rank 252 (x): command not found"))
        return handled

    with pytest.raises(LaunchError, match=r"^host h63: cannot start rank 252 \(x\): command not found$"):
        job(behaviour).run()


CHUNKS = 40
"""Of 64 KB: more than an agent keeps before it tells its ranks to wait."""


def test_output_of_many_hosts_waits_for_the_launcher_and_arrives_whole(job: Make) -> None:
    line = b"x" * 65535 + b"\n"
    waited: set[int] = set()
    left = dict.fromkeys(range(0, HOSTS, 8), CHUNKS)

    def write(far: FarAgent) -> None:
        """A rank that writes as long as it may: an agent reads no more from it while its own stream is full."""
        while left[far.number] and not far.congested:
            left[far.number] -= 1
            far.tell(OutputData(far.ranks[0], "stdout", line))
        if left[far.number]:
            waited.add(far.number)
        elif left[far.number] == 0:
            left[far.number] = -1
            for rank in far.ranks:
                far.finish(rank, Exit(0))

    def behaviour(far: FarAgent, order: Any) -> bool:
        if isinstance(order, StartProcesses) and far.number in left:
            far.ranks = [plan.number for plan in order.plans]
            far.on_relief = lambda: write(far)
            write(far)
            return True
        return False

    made = job(behaviour)
    outcome = made.run()
    assert not outcome.failed and waited == set(left)
    lines = made.out.getvalue().splitlines()
    assert [sum(f"[{n * EACH}]<stdout>:" + "x" * 65535 == each for each in lines) for n in left] == [CHUNKS] * len(left)
    assert len(lines) == CHUNKS * len(left) + (HOSTS - len(left)) * EACH


def test_a_host_that_never_confirms_its_end_does_not_delay_the_job(job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SWEEP_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)
    outcome = job(lambda far, order: isinstance(order, End) and far.number in (9, 33)).run()
    assert (outcome.failed, outcome.unheard) == (False, ["h9", "h33"])
    assert len(outcome.exits) == HOSTS * EACH
    assert "h9, h33 did not confirm that the job has ended there" in outcome.describe()


def test_processes_that_cannot_be_ended_are_named_for_all_hosts(job: Make) -> None:
    def behaviour(far: FarAgent, order: Any) -> bool:
        if isinstance(order, End):
            far.tell(Closed([100 + far.number] if far.number in (1, 62) else []))
            return True
        return False

    outcome = job(behaviour).run()
    assert outcome.immortal == {101, 162} and outcome.unheard == []


def test_hosts_that_are_lost_one_after_the_other_have_one_message(job: Make) -> None:
    """As when a switch fails: the first is named, and the job ends although nobody of them answers."""

    def behaviour(far: FarAgent, order: Any) -> bool:
        handled = stay(far, order)
        if isinstance(order, StartProcesses) and far.number >= 32:
            made.loop.after(("lost", far.number), 0.001 * far.number, far.stream.close)
        return handled

    made = job(behaviour)
    outcome = made.run()
    assert (outcome.culprit, outcome.exit.code) == (32 * EACH, 255)
    assert outcome.unheard == [f"h{number}" for number in range(32, HOSTS)]
    assert outcome.describe().count("failed first") == 1 and len(outcome.exits) == HOSTS * EACH
    assert made.err.getvalue().count("exit with status code") == 1
