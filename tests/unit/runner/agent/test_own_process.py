"""A process that something else has started becomes a rank: its agent runs on a thread of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret
from horovod.runner.agent.base import Agent
from horovod.runner.agent.messages import (
    AgentEvent,
    AgentReady,
    Closed,
    Ended,
    Exit,
    Lost,
    NotStarted,
    OutputData,
    Prepare,
    ProcessPlan,
    Stopped,
)
from horovod.runner.agent.own_process import NotWanted, RankOfOwnProcess
from horovod.runner.event_loop import Loop
from horovod.runner.reach.awaiting_agent import SocketConnection
from horovod.runner.reach.remote import RemoteAgent
from time_limits import SOON


class Launcher:
    """The launcher's side of one such process."""

    def __init__(self, server: RendezvousServer, secret: bytes, connection: socket.socket) -> None:
        self.loop = Loop()
        self.events: list[AgentEvent] = []
        self.agent = RemoteAgent(
            "a worker", self.loop, self._report, SocketConnection(connection),
            Prepare(encode_secret(secret), "", [("127.0.0.1", server.address[1])], SOON),
        )  # fmt: skip

    def _report(self, _: Agent, event: AgentEvent) -> None:
        self.events.append(event)

    def until(self, kind: type[AgentEvent]) -> AgentEvent:
        """The first event of a kind, among those that have not been looked at."""
        found: list[AgentEvent] = []

        def has_come() -> bool:
            while self.events and not found:
                event = self.events.pop(0)
                if isinstance(event, kind):
                    found.append(event)
            return bool(found)

        self.loop.run(has_come, time.monotonic() + SOON)
        assert found, f"no {kind.__name__} came"
        return found[0]

    def close(self) -> None:
        self.agent.kill()
        self.loop.close()


@pytest.fixture
def pair() -> Iterator[tuple[Launcher, RankOfOwnProcess]]:
    secret = make_secret()
    server = RendezvousServer(secret, "127.0.0.1", expected=2)
    server.start()
    near, far = socket.socketpair()
    rank = RankOfOwnProcess(far)
    try:
        with closing(Launcher(server, secret, near)) as launcher:
            launcher.until(AgentReady)
            yield launcher, rank
    finally:
        server.stop()


def test_it_gets_its_variables_and_says_how_its_work_has_ended(pair: tuple[Launcher, RankOfOwnProcess]) -> None:
    launcher, rank = pair
    launcher.agent.start({"SHARED": "1"}, [ProcessPlan(7, (), {"OWN": "2"})])
    assert rank.begin(SOON) == {"SHARED": "1", "OWN": "2"}
    launcher.agent.look()
    assert launcher.until(Stopped) == Stopped([])
    rank.end(Exit(1, reason="ValueError: no data"))
    assert launcher.until(OutputData) == OutputData(7, "stdout", b"")
    assert launcher.until(OutputData) == OutputData(7, "stderr", b"")
    assert launcher.until(Ended) == Ended(7, Exit(1, reason="ValueError: no data"))
    launcher.agent.end(0.0, hunt=False)
    assert launcher.until(Closed) == Closed([])


def test_it_is_one_rank_only(pair: tuple[Launcher, RankOfOwnProcess]) -> None:
    launcher, _ = pair
    launcher.agent.start({}, [ProcessPlan(1, (), {}), ProcessPlan(2, (), {})])
    refused = launcher.until(NotStarted)
    assert isinstance(refused, NotStarted) and refused.process == 2


def test_a_request_to_end_is_left_to_the_rank(pair: tuple[Launcher, RankOfOwnProcess]) -> None:
    launcher, rank = pair
    launcher.agent.start({}, [ProcessPlan(3, (), {})])
    rank.begin(SOON)
    launcher.agent.signal(15, [3])
    launcher.agent.signal(9, [3])  # comes after the time in which a process may end
    launcher.agent.look()
    launcher.until(Stopped)
    rank.end(Exit(0))
    assert launcher.until(Ended) == Ended(3, Exit(0))


def test_it_is_told_that_the_job_has_ended(pair: tuple[Launcher, RankOfOwnProcess]) -> None:
    launcher, rank = pair
    launcher.agent.kill()
    with pytest.raises(NotWanted, match="has ended before this one could join"):
        rank.begin(SOON)
    rank.end(Exit(0))


def test_a_launcher_that_does_not_start_it_is_not_waited_for(pair: tuple[Launcher, RankOfOwnProcess]) -> None:
    _, rank = pair
    with pytest.raises(TimeoutError, match=r"within 0\.01 seconds"):
        rank.begin(0.01)


def test_the_launcher_learns_that_the_server_is_gone() -> None:
    secret = make_secret()
    server = RendezvousServer(secret, "127.0.0.1", expected=2)
    server.start()
    near, far = socket.socketpair()
    rank = RankOfOwnProcess(far)
    with closing(Launcher(server, secret, near)) as launcher:
        launcher.until(AgentReady)
        server.stop()
        launcher.until(Lost)
        with pytest.raises(NotWanted):
            rank.begin(SOON)
