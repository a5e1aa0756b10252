"""Liveness monitors of two hosts in one process: what holds of ranks connected with rank 0 holds of ranks behind relays.

Ranks 0 and 1 are on one host. Ranks 2 to 5 are on another, whose relays are 2 and 3.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from horovod.control.channel import Channel
from horovod.control.connection import Connection
from horovod.control.failure import Cause, FailureKind
from horovod.control.failure_detector import NO_PROGRESS_REPORTS, STUCK
from horovod.control.liveness_messages import Bye, Forwarded, encode
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.liveness_tree import LivenessTree
from horovod.control.processes import KILLED, STOPPED
from time_limits import SOON
from unit.control.complaints import complain
from unit.control.concurrent_ranks import wait_until
from unit.control.monitors import HeldUpPoll, polling_with

HOSTS = "aabbbb"
TREE = LivenessTree(6, [[2, 3, 4, 5]])
ANSWER = 0.15
LONG = 60.0


class SimulatedHostRank:
    """One rank's monitor, what it was told, and a switch that holds it up as SIGSTOP does."""

    def __init__(self, job: SimulatedHosts, rank: int, channels: dict[int, Channel], answer_seconds: float) -> None:
        self.rank = rank
        self.channels = channels
        self.failures: list[tuple[int, str, Cause]] = []
        self.failed = threading.Event()
        self.runs = threading.Event()
        self.runs.set()
        self.ended = self.left = False
        self.dumps: list[str] = []
        self.progress: list[tuple[int, bytes]] = []
        self.polls = HeldUpPoll(self.runs)
        with polling_with(self.polls):
            self.monitor = LivenessMonitor(
                rank,
                TREE,
                channels,
                answer_seconds,
                0,
                lambda: f"train.py:{rank}",
                lambda other: job.look(rank, other),
                lambda other: f"rank {other}",
                self._fail,
                on_dump=lambda why, reason: self.dumps.append(reason),
                on_progress=lambda other, body: self.progress.append((other, body)),
            )
        self.monitor.start()

    def _fail(self, rank: int, reason: str, cause: Cause) -> None:
        self.failures.append((rank, reason, cause))
        self.failed.set()

    def told(self) -> tuple[int, str]:
        assert self.failed.wait(SOON), f"rank {self.rank} was told nothing"
        assert len(self.failures) == 1
        return self.failures[0][:2]

    def leave(self) -> None:
        self.runs.set()
        if not self.left:
            self.left = True
            self.monitor.leave()

    def die(self) -> None:
        """As the kernel ends a killed process: its connections close without a word."""
        self.left = self.ended = True
        self.polls.kill(self.monitor, self.channels)


class SimulatedHosts:
    """All ranks of the job."""

    def __init__(self, answer_seconds: float = LONG) -> None:
        pairs = {(rank, peer): socket.socketpair() for rank in range(6) for peer in TREE.peers(rank) if rank < peer}
        channels: list[dict[int, Channel]] = [{} for _ in range(6)]
        for (rank, peer), (one, other) in pairs.items():
            channels[rank][peer], channels[peer][rank] = Channel(Connection(one)), Channel(Connection(other))
        self.ranks: list[SimulatedHostRank] = []
        for rank in range(6):
            self.ranks.append(SimulatedHostRank(self, rank, channels[rank], answer_seconds))

    def look(self, rank: int, other: int) -> str | None:
        if HOSTS[rank] != HOSTS[other] or other >= len(self.ranks):
            return None
        seen = self.ranks[other]
        return KILLED if seen.ended else "" if seen.runs.is_set() else STOPPED

    def told(self, *but: int) -> set[tuple[int, str]]:
        """What all other ranks were told."""
        return {rank.told() for rank in self.ranks if rank.rank not in but}

    def close(self) -> None:
        for rank in self.ranks:
            rank.runs.set()
        for rank in reversed(self.ranks):
            rank.leave()


@pytest.fixture
def started() -> Iterator[Callable[..., SimulatedHosts]]:
    made: list[SimulatedHosts] = []

    def start(answer_seconds: float = LONG) -> SimulatedHosts:
        made.append(SimulatedHosts(answer_seconds))
        return made[-1]

    yield start
    for job in made:
        job.close()


@pytest.mark.parametrize("victim", range(6))
def test_a_rank_that_dies_is_named_by_all(started: Callable[..., SimulatedHosts], victim: int) -> None:
    job = started()
    job.ranks[victim].die()
    assert job.told(victim) == {(victim, KILLED)}


@pytest.mark.parametrize("victim", range(1, 6))
@pytest.mark.parametrize("asker", [0, 1, 5])
def test_a_rank_that_is_stopped_is_named_by_all(
    started: Callable[..., SimulatedHosts], victim: int, asker: int
) -> None:
    if victim == asker:
        asker = 4
    job = started(ANSWER)
    job.ranks[victim].runs.clear()
    job.ranks[asker].monitor.probe()
    assert job.told(victim) == {(victim, STOPPED)}


@pytest.mark.parametrize("reporter", range(6))
@pytest.mark.parametrize("suspected", [False, True])
def test_a_report_becomes_everybodys_failure(
    started: Callable[..., SimulatedHosts], reporter: int, suspected: bool
) -> None:
    job = started()
    cause = Cause(FailureKind.TIME_LIMIT, "allreduce.loss", {1: "train.py:9"})
    job.ranks[reporter].monitor.report(1, "it is late", suspected, cause)
    assert job.told() == {(1, "it is late")}
    assert [rank.failures[0][2] for rank in job.ranks] == [cause] * 6


def test_ranks_that_die_and_reports_that_contradict_each_other_end_in_one_failure(
    started: Callable[..., SimulatedHosts],
) -> None:
    dice = random.Random(11)
    for _ in range(20):
        job = started()
        victim = dice.choice([1, 4, 5])
        for rank in dice.sample([job.ranks[victim], *dice.sample(job.ranks, 3)], 4):
            if rank.rank == victim:
                if not rank.ended:
                    rank.die()
            else:
                rank.monitor.report(rank.rank, "it said so")
        assert len(job.told(victim)) == 1
        job.close()


def test_a_relay_that_is_lost_after_the_other_leaves_the_ranks_behind_them_to_name_it(
    started: Callable[..., SimulatedHosts],
) -> None:
    job = started()
    job.ranks[2].leave()
    wait_until(lambda: 2 not in job.ranks[5].monitor.peers(), "the good-bye")
    job.ranks[3].die()
    assert job.told(2, 3) == {(3, KILLED)}
    assert job.ranks[2].failures == []


def test_rank_0_hears_where_all_ranks_are_also_while_a_relay_does_not_answer(
    started: Callable[..., SimulatedHosts], caplog: pytest.LogCaptureFixture
) -> None:
    job = started(ANSWER)
    lines = {rank: f"train.py:{rank}" for rank in range(6)}
    job.ranks[0].monitor.probe()
    wait_until(lambda: job.ranks[0].monitor.call_sites == lines, "the answers")
    job.ranks[0].monitor.call_sites.clear()
    job.look = lambda rank, other: "" if HOSTS[rank] == HOSTS[other] else None  # type: ignore[method-assign]
    job.ranks[2].runs.clear()
    job.ranks[0].monitor.probe()
    wait_until(lambda: len(job.ranks[0].monitor.call_sites) == 6, "the answers but one")
    wait_until(lambda: "or was when" in job.ranks[0].monitor.call_sites[2], "that of rank 2")
    assert {rank: job.ranks[0].monitor.call_sites[rank] for rank in (0, 1, 3, 4, 5)} == {
        rank: lines[rank] for rank in (0, 1, 3, 4, 5)
    }
    assert {message.split(" has not")[0] for message in caplog.messages} == {"rank 2"}
    job.ranks[2].runs.set()
    wait_until(lambda: job.ranks[0].monitor.call_sites[2] == lines[2], "the answer of rank 2")
    assert not any(rank.failures for rank in job.ranks)


def test_a_relay_that_leaves_at_once_passes_on_what_it_has_been_sent(started: Callable[..., SimulatedHosts]) -> None:
    job = started()
    body = os.urandom(1_000_000)
    job.ranks[5].monitor.report_progress(body)
    wait_until(lambda: job.ranks[0].progress or job.ranks[2].channels[0].wants_write, "the report")
    job.ranks[2].leave()
    wait_until(lambda: 2 not in job.ranks[0].monitor.peers(), "the good-bye")
    assert job.ranks[0].progress == [(5, body)]
    assert not any(rank.failures for rank in job.ranks)


@pytest.mark.parametrize("asker", range(6))
def test_a_dump_that_any_rank_asks_for_is_made_once_by_each(started: Callable[..., SimulatedHosts], asker: int) -> None:
    job = started()
    job.ranks[asker].monitor.request_dump("stall", "it is slow")
    wait_until(lambda: all(rank.dumps for rank in job.ranks), "all dumps")
    job.ranks[0].monitor.probe()  # behind whatever else was under way
    wait_until(lambda: len(job.ranks[0].monitor.call_sites) == 6, "the answers")
    assert [rank.dumps for rank in job.ranks] == [["it is slow"]] * 6


def test_progress_reports_arrive_once_in_order_with_their_ranks(
    started: Callable[..., SimulatedHosts],
) -> None:
    job = started()
    body = os.urandom(300_000)  # more than a socket takes at once
    for rank in job.ranks[1:]:
        for number in range(5):
            rank.monitor.report_progress(bytes([number]) + body)
    for rank in (5, 4, 3, 2, 1):
        ready = job.ranks[rank].monitor
        if rank in (2, 3):
            assert ready.everyone_left.wait(SOON)
        wait_until(lambda rank=rank: sum(other == rank for other, _ in job.ranks[0].progress) == 5, "all reports")
        job.ranks[rank].leave()
    assert job.ranks[0].monitor.everyone_left.wait(SOON)
    assert sorted(job.ranks[0].progress) == [(rank, bytes([n]) + body) for rank in range(1, 6) for n in range(5)]
    for rank in range(1, 6):
        assert [found[0] for other, found in job.ranks[0].progress if other == rank] == list(range(5))


def test_a_rank_that_answers_and_stays_stuck_is_to_blame_after_some_complaints_of_a_rank_behind_relays(
    started: Callable[..., SimulatedHosts],
) -> None:
    job = started()
    assert complain(job.ranks[5], job.ranks) >= NO_PROGRESS_REPORTS
    assert job.told() == {(1, STUCK.format("no progress"))}


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1), (2, 3, 0, 4, 1, 5), (4, 2, 5, 3, 1, 0)])
def test_leaving_in_any_order_is_no_failure_and_ranks_that_left_are_not_pinged(
    started: Callable[..., SimulatedHosts], order: list[int]
) -> None:
    job = started(ANSWER)
    for rank in order:
        job.ranks[rank].leave()
        if not job.ranks[0].left and rank:
            wait_until(lambda rank=rank: rank not in job.ranks[0].monitor.peers(), "the good-bye")
            job.ranks[0].monitor.call_sites.clear()
            job.ranks[0].monitor.probe()
            here = {each.rank for each in job.ranks if not each.left}
            expected = here if {2, 3} & here else here - {4, 5}  # without relays they cannot be asked
            wait_until(lambda expected=expected: expected <= set(job.ranks[0].monitor.call_sites), "the answers")
    assert not any(rank.failures for rank in job.ranks)


def test_leaving_all_at_once_is_no_failure(started: Callable[..., SimulatedHosts]) -> None:
    for _ in range(20):
        job = started()
        threads = [threading.Thread(target=rank.leave) for rank in job.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
            assert not thread.is_alive()
        assert not any(rank.failures for rank in job.ranks)


@pytest.mark.parametrize(
    "message",
    [Forwarded([1], encode(Bye())), Forwarded([4, 5], encode(Bye())), Forwarded([], b""), Forwarded([4], b"?")],
)
def test_a_relay_that_speaks_for_others_than_its_host_is_to_blame(
    started: Callable[..., SimulatedHosts], message: Forwarded
) -> None:
    job = started()
    job.ranks[2].channels[0].send(encode(message))  # its monitor has nothing to send
    for rank in (0, 1, 3):
        lost, reason = job.ranks[rank].told()
        assert lost == 2 and reason.startswith("it sent an invalid message")
    assert {job.ranks[rank].told()[0] for rank in (4, 5)} <= {0, 2}  # rank 0 has closed the connection to rank 2
