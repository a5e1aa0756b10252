"""A process of an elastic job asks a real server for its assignments; the test plays the launcher."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from horovod._base import config
from horovod.control import elastic_messages as messages
from horovod.control.elastic_messages import (
    HostsChanged,
    Leaving,
    NoRank,
    RankAssignment,
    ReadyForRound,
    RoundOver,
    WorkerMessage,
)
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.server import RendezvousServer
from horovod.core.errors import NoNextRound
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.elastic_process import ElasticProcess
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, wait_until

SECRET = b"s" * 32
SECONDS = SOON
NUMBER = 7


class Launcher:
    """The other side."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        self.server = RendezvousServer(SECRET)
        self.server.pass_on(messages.MESSAGES, self._hear)
        self.server.start()

    def _hear(self, key: str, value: bytes) -> None:
        assert key == messages.message_key(NUMBER)
        self.received.put(messages.decode_message(value))

    def answer(self, answer: messages.Answer) -> ReadyForRound:
        """Wait for the question, and answer it."""
        ready = self.received.get(timeout=SECONDS)
        assert isinstance(ready, ReadyForRound)
        self.server.put(messages.answer_key(NUMBER, ready.question), messages.encode(answer))
        return ready

    def announce(self, round_number: int, number: int, news: messages.News) -> None:
        self.server.put(messages.news_key(round_number, number), messages.encode(news))

    def process(self) -> ElasticProcess:
        return ElasticProcess(self.server.address, SECRET, NUMBER)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    for name in elastic_process.VARIABLES:  # which a process changes, and monkeypatch restores
        monkeypatch.setenv(name, "0")
    before = threading.active_count()
    made = Launcher()
    yield made
    made.server.stop()
    wait_until(lambda: threading.active_count() <= before, "the end of all threads")


def assignment(round_number: int, rank: int = 2) -> RankAssignment:
    return RankAssignment(round_number, rank, 5, 1, 3, 0, 2)


def enter(launcher: Launcher, process: ElasticProcess, round_number: int) -> ReadyForRound:
    running = ConcurrentCalls(process.take_rank)
    ready = launcher.answer(assignment(round_number))
    running.results()
    return ready


def test_the_place_becomes_the_environment(launcher: Launcher) -> None:
    assert enter(launcher, launcher.process(), 1) == ReadyForRound(0, 0, False, "hvd.init() was called.")
    names = (config.RANK, config.SIZE, config.LOCAL_RANK, config.LOCAL_SIZE, config.CROSS_RANK, config.CROSS_SIZE)
    assert [os.environ[name] for name in names] == ["2", "5", "1", "3", "0", "2"]
    assert os.environ[config.ELASTIC_ROUND] == "1"


def test_a_place_that_was_asked_for_before_init_is_the_one_that_init_uses(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    running = ConcurrentCalls(partial(process.next, True, "rank 3 failed"))
    assert launcher.answer(assignment(2)) == ReadyForRound(1, 1, True, "rank 3 failed")
    running.results()
    process.take_rank()  # does not ask
    assert launcher.received.empty()


def test_a_process_says_which_collective_has_failed_once_and_learns_who_is_lost(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    process.interrupted = "allreduce 'loss'"
    for number, collective in ((2, "allreduce 'loss'"), (3, "")):
        running = ConcurrentCalls(partial(process.next, True, "rank 3 failed", line="train.py:7"))
        lost = [f"rank 3 in round {each}" for each in range(1, number)]
        asked = launcher.answer(msgspec.structs.replace(assignment(number), lost=lost))
        assert (asked.line, asked.collective) == ("train.py:7", collective)
        running.results()
        assert process.lost == lost


def test_the_end_of_the_job_is_an_error_that_is_not_caught_by_the_loop(launcher: Launcher) -> None:
    running = ConcurrentCalls(launcher.process().take_rank)
    launcher.answer(NoRank("too few are left", job_ends=True))
    with pytest.raises(NoNextRound, match="The job ends: too few are left"):
        running.results()


def test_a_process_that_is_not_needed_ends_well(launcher: Launcher) -> None:
    running = ConcurrentCalls(launcher.process().take_rank)
    launcher.answer(NoRank("its host is withdrawn", job_ends=False))
    with pytest.raises(SystemExit) as ended:
        running.results()
    assert ended.value.code == 0


def test_a_launcher_that_is_gone_ends_the_job(launcher: Launcher) -> None:
    process = launcher.process()
    running = ConcurrentCalls(process.take_rank)
    launcher.received.get(timeout=SECONDS)
    launcher.server.stop()
    with pytest.raises(NoNextRound, match="could not ask the launcher"):
        running.results()


def test_a_launcher_that_ends_when_it_has_given_a_place_ends_the_job(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = launcher.process()
    connections: list[RendezvousClient] = []

    def connect(*arguments: Any) -> RendezvousClient:
        if connections:
            raise RendezvousError("cannot connect to the rendezvous server")
        connections.append(RendezvousClient(*arguments))
        return connections[-1]

    monkeypatch.setattr(elastic_process, "RendezvousClient", connect)
    running = ConcurrentCalls(partial(process.next, True, "rank 3 failed."))
    launcher.answer(assignment(2))
    with pytest.raises(
        NoNextRound, match=r"rank 3 failed\. The launcher has ended since it gave a rank in the next round"
    ):
        running.results()


def test_news_of_hosts_are_told_once(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    launcher.announce(1, 0, HostsChanged(1))
    launcher.announce(1, 1, HostsChanged(2))
    heard: list[int] = []
    wait_until(lambda: heard.append(process.take_news()) or sum(heard) == 3, "the news")
    assert process.take_news() == 0


def test_news_of_a_round_are_not_told_in_the_next_one(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    launcher.announce(1, 0, HostsChanged(2))
    enter(launcher, process, 2)
    assert process.take_news() == 0


@pytest.mark.parametrize("early", [False, True])
def test_connecting_ranks_are_told_that_the_round_is_over(launcher: Launcher, early: bool) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    if not early:
        process.call_when_over(heard.put)
    launcher.announce(1, 0, HostsChanged(1))
    launcher.announce(1, 1, RoundOver("rank 1 has ended"))
    if early:
        launcher.announce(1, 2, HostsChanged(2))
        wait_until(lambda: process.take_news() & 2, "news behind that")
        process.call_when_over(heard.put)
    assert heard.get(timeout=SECONDS) == "rank 1 has ended"


def test_a_process_asked_to_end_tells_the_launcher_unless_the_job_ends(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    assert process.leave()
    assert launcher.received.get(timeout=SECONDS) == Leaving(1)
    launcher.server.put(messages.ENDING, b"")
    assert not process.leave()
    assert launcher.received.empty()


def test_nothing_accumulates_over_many_rounds(launcher: Launcher) -> None:
    process = launcher.process()
    enter(launcher, process, 1)
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for number in range(2, 30):
        enter(launcher, process, number)
    assert threading.active_count() <= threads + 1
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 2


def test_a_late_rank_cannot_join_the_meeting_of_an_earlier_round(launcher: Launcher) -> None:
    launcher.server.end_rounds(3, "rank 1 was lost")
    with (
        RendezvousClient(launcher.server.address, SECRET, SECONDS) as client,
        pytest.raises(RendezvousError, match="rank 1 was lost"),
    ):
        client.exchange("init//3", 0, 2, b"", SECONDS, (), 3)


def test_ranks_that_wait_in_a_round_that_ends_are_told(launcher: Launcher) -> None:
    def meet() -> None:
        with RendezvousClient(launcher.server.address, SECRET, SECONDS) as client:
            client.exchange("init//4", 0, 2, b"", 600.0, (), 4)

    running = ConcurrentCalls(meet)
    launcher.server.end_rounds(3, "an earlier one")
    launcher.server.end_rounds(4, "rank 1 was lost")
    with pytest.raises(RendezvousError, match="rank 1 was lost"):
        running.results()
