"""Liveness monitors in one process, a star of socket pairs between them: all ranks give one answer to "who failed first?"."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from connections import frame
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from horovod.control.failure import ENGINE, Cause, FailureKind
from horovod.control.failure_detector import NO_PROGRESS_REPORTS, STUCK, UNRESPONSIVE
from horovod.control.liveness_messages import (
    Bye,
    DumpRequest,
    Failure,
    FailureReport,
    NoProgress,
    Ping,
    Pong,
    decode,
    encode,
)
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.liveness_tree import LivenessTree
from horovod.control.processes import KILLED, STOPPED
from time_limits import SOON
from unit.control.complaints import complain
from unit.control.concurrent_ranks import wait_until
from unit.control.monitors import CountingPoll, polling_with

ANSWER = 0.15
"""Seconds that a peer may take to answer, where a test is about one that does not."""
LONG = 60.0


class Rank:
    """One rank's liveness monitor and what it was told."""

    def __init__(
        self, rank: int, links: dict[int, Channel], answer_seconds: float, tree: LivenessTree | None = None
    ) -> None:
        self.links = links
        self.failures: list[tuple[int, str]] = []
        self.causes: list[Cause] = []
        self.failed = threading.Event()
        self.seen: dict[int, str] = {}
        """What it sees of the processes of others, as far as it sees them."""
        self.looked_at: list[int] = []
        self.where: Callable[[], str] = lambda: f"train.py:{rank} in step"
        self.on_dump: Callable[[], None] = lambda: None
        self.polls = CountingPoll()
        with polling_with(self.polls):
            self.monitor = LivenessMonitor(
                rank,
                tree or LivenessTree(max([rank, *links]) + 1),
                links,
                answer_seconds,
                0,
                lambda: self.where(),
                self.look,
                lambda other: f"rank {other} (host h{other}, process 1{other})",
                self.failure,
                on_dump=lambda why, reason: self.on_dump(),
            )
        self.left = False

    def look(self, other: int) -> str | None:
        self.looked_at.append(other)
        return self.seen.get(other)

    def failure(self, rank: int, reason: str, cause: Cause) -> None:
        self.failures.append((rank, reason))
        self.causes.append(cause)
        self.failed.set()

    def wait(self) -> tuple[int, str]:
        assert self.failed.wait(SOON), "no failure"
        return self.failures[0]

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self.monitor.leave()

    def die(self) -> None:
        """As the kernel ends a killed process: its connections close without a word."""
        self.left = True
        self.polls.kill(self.monitor, self.links)


class Peer:
    """The other end of one link, served by the test itself."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Channel(Connection(connection))
        self._inbox: list[object] = []

    def say(self, message: object) -> None:
        self.channel.send(encode(message))

    def hear(self) -> object:
        """The next message; None at the end of the connection."""

        def arrived() -> bool:
            if not self._inbox:
                try:
                    self._inbox += [decode(body) for body in self.channel.receive()]
                except ChannelClosed:
                    self._inbox.append(None)
            return bool(self._inbox)

        wait_until(arrived, "a message")
        return self._inbox.pop(0)

    def heard_nothing(self) -> bool:
        if not self._inbox:
            self._inbox += [decode(body) for body in self.channel.receive()]
        return not self._inbox


class Job:
    """Makes liveness monitors and the ends of links that tests hold; ends them all."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def star(self, size: int, answer_seconds: float = LONG) -> list[Rank]:
        pairs = {peer: socket.socketpair() for peer in range(1, size)}
        links = [{peer: Channel(Connection(pair[0])) for peer, pair in pairs.items()}]
        links += [{0: Channel(Connection(pairs[peer][1]))} for peer in range(1, size)]
        ranks = [Rank(rank, some, answer_seconds) for rank, some in enumerate(links)]
        for rank in ranks:
            self._stack.callback(rank.leave)
            rank.monitor.start()
        return ranks

    def alone(
        self, rank: int, peers: list[int], answer_seconds: float = LONG, start: bool = True
    ) -> tuple[Rank, dict[int, Peer]]:
        """One liveness monitor whose peers the test plays."""
        pairs = {peer: socket.socketpair() for peer in peers}
        made = Rank(rank, {peer: Channel(Connection(pair[0])) for peer, pair in pairs.items()}, answer_seconds)
        played = {peer: Peer(pair[1]) for peer, pair in pairs.items()}
        for peer in played.values():
            self._stack.callback(peer.channel.close)
        self._stack.callback(made.leave)
        if start:
            made.monitor.start()
        return made, played

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_a_rank_that_dies_is_named_the_same_everywhere(job: Job) -> None:
    ranks = job.star(4)
    ranks[2].die()
    survivors = [ranks[0], ranks[1], ranks[3]]
    assert [rank.wait() for rank in survivors] == [(2, KILLED)] * 3


def test_rank_0_that_dies_is_named_by_each(job: Job) -> None:
    ranks = job.star(4)
    ranks[0].die()
    assert [rank.wait() for rank in ranks[1:]] == [(0, KILLED)] * 3


def test_the_failure_comes_once_however_many_die_after_the_first(job: Job) -> None:
    ranks = job.star(4)
    ranks[1].die()
    assert ranks[0].wait() == (1, KILLED)
    assert ranks[3].wait() == (1, KILLED)
    ranks[2].die()
    ranks[0].monitor.report(3, "too late")
    ranks[0].leave()
    ranks[3].leave()
    assert ranks[0].failures == ranks[3].failures == [(1, KILLED)]


@pytest.mark.parametrize("reporter", [0, 1, 2])
def test_a_report_becomes_everybodys_failure(job: Job, reporter: int) -> None:
    ranks = job.star(3)
    ranks[reporter].monitor.report(1, "it ran out of paper")
    assert [rank.wait() for rank in ranks] == [(1, "it ran out of paper")] * 3


@pytest.mark.parametrize("suspected", [False, True])
@pytest.mark.parametrize("reporter", [0, 2])
def test_all_ranks_learn_the_kind_of_failure(job: Job, reporter: int, suspected: bool) -> None:
    ranks = job.star(3)
    cause = Cause(FailureKind.TIME_LIMIT, "allreduce.loss", {1: "train.py:9 in validate"})
    ranks[reporter].monitor.report(1, "it is late", suspected, cause)
    for rank in ranks:
        rank.wait()
    assert [rank.causes for rank in ranks] == [[cause]] * 3


def test_reports_that_contradict_each_other_end_in_one_failure(job: Job) -> None:
    ranks = job.star(5)
    for rank in ranks:
        rank.monitor.report((ranks.index(rank) + 1) % 5, f"reported by {ranks.index(rank)}")
    assert len({rank.wait() for rank in ranks}) == 1


@pytest.mark.parametrize("reporter", [0, 2])
def test_a_suspicion_while_all_answer_accuses_whom_it_named(job: Job, reporter: int) -> None:
    ranks = job.star(3)
    ranks[reporter].monitor.report(1, "made no progress", suspected=True)
    assert [rank.wait() for rank in ranks] == [(1, "made no progress")] * 3


def test_a_suspicion_finds_the_peer_that_really_does_not_answer(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2], ANSWER)
    rank.monitor.report(2, "made no progress", suspected=True)
    assert peers[1].hear() == peers[2].hear() == Ping()
    peers[2].say(Pong("train.py:2"))
    assert rank.wait() == (1, UNRESPONSIVE)
    assert [peers[2].hear(), peers[2].hear()] == [Ping([1]), Failure(1, UNRESPONSIVE)]


def test_the_death_behind_a_suspicion_is_what_is_told(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2])
    rank.monitor.report(1, "made no progress", suspected=True)
    assert peers[2].hear() == Ping()
    peers[2].channel.close()
    assert rank.wait() == (2, KILLED)
    assert [peers[1].hear(), peers[1].hear()] == [Ping(), Failure(2, KILLED)]


def test_a_second_suspicion_while_the_first_is_looked_into_changes_nothing(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2])
    rank.monitor.report(1, "first", suspected=True)
    rank.monitor.report(2, "second", suspected=True)
    assert peers[1].hear() == peers[2].hear() == Ping()
    for peer in peers.values():
        peer.say(Pong(""))
    assert rank.wait() == (1, "first")


def test_a_certainty_ends_the_looking_into_a_suspicion(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2])
    rank.monitor.report(1, "made no progress", suspected=True)
    rank.monitor.report(2, "its worker thread failed")
    assert rank.wait() == (2, "its worker thread failed")
    assert [peers[1].hear(), peers[1].hear()] == [Ping(), Failure(2, "its worker thread failed")]


def test_a_probe_of_peers_that_answer_has_no_consequence_but_tells_where_they_are(job: Job) -> None:
    ranks = job.star(3)
    ranks[0].monitor.probe()
    wait_until(lambda: {1, 2} <= ranks[0].monitor.call_sites.keys(), "the answers")
    assert ranks[0].monitor.call_sites == {rank: f"train.py:{rank} in step" for rank in range(3)}
    ranks[1].monitor.probe()
    wait_until(lambda: 0 in ranks[1].monitor.call_sites, "the answer")
    assert ranks[1].monitor.call_sites == {rank: f"train.py:{rank} in step" for rank in range(2)}
    assert [rank.failures for rank in ranks] == [[], [], []]


def test_a_peer_that_does_not_answer_because_it_is_stopped(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2], ANSWER)
    rank.seen[1] = STOPPED
    rank.monitor.probe()
    assert peers[2].hear() == Ping()
    peers[2].say(Pong("train.py:2"))
    assert rank.wait() == (1, STOPPED)
    assert peers[2].hear() == Failure(1, STOPPED)


def test_a_member_whose_rank_0_is_stopped_says_so_itself(job: Job) -> None:
    rank, _ = job.alone(3, [0], ANSWER)
    rank.seen[0] = STOPPED
    rank.monitor.probe()
    assert rank.wait() == (0, STOPPED)


@pytest.mark.parametrize("own", [0, 3])
def test_an_invisible_peer_that_does_not_answer_for_long_is_lost(job: Job, own: int) -> None:
    rank, _ = job.alone(own, [4 if own == 0 else 0], 0.02)
    rank.monitor.probe()
    assert rank.wait() == (4 if own == 0 else 0, UNRESPONSIVE)


def test_a_running_peer_that_does_not_answer_is_waited_for_with_a_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    rank, peers = job.alone(0, [1], 0.02)
    rank.seen[1] = ""
    rank.monitor.probe()
    assert peers[1].hear() == Ping()
    peers[1].say(Pong("train.py:31 in load"))
    wait_until(lambda: rank.monitor.call_sites.get(1) == "train.py:31 in load", "the answer")
    caplog.clear()
    rank.monitor.probe()
    wait_until(lambda: len(caplog.records) == 3, "the third word")  # after 0.02, 0.04 and 0.08 seconds
    told = r"rank 1 \(host h1, process 11\) has not answered for \d+ seconds; it was at train\.py:31 in load\. Its process runs"
    assert re.match(told, caplog.messages[0])
    assert rank.monitor.call_sites[1] == "train.py:31 in load, or was when it last answered"
    assert rank.failures == []
    peers[1].say(Pong("train.py:1 in step"))
    wait_until(lambda: rank.monitor.call_sites[1] == "train.py:1 in step", "the answer")


def test_others_look_at_the_process_that_this_rank_cannot_see(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2], ANSWER)
    rank.monitor.probe()
    assert peers[2].hear() == Ping()
    peers[2].say(Pong(""))
    for _ in range(2):
        assert peers[2].hear() == Ping([1])
        peers[2].say(Pong("", {1: STOPPED}))
    assert rank.wait() == (1, STOPPED)


def test_a_rank_that_is_asked_about_others_tells_what_it_sees(job: Job) -> None:
    rank, peers = job.alone(1, [0])
    rank.seen.update({2: "", 3: STOPPED})
    peers[0].say(Ping([2, 3, 4]))
    assert peers[0].hear() == Pong("train.py:1 in step", {2: "", 3: STOPPED})


def test_a_stuck_rank_that_answers_is_blamed_after_repeated_reports(job: Job) -> None:
    ranks = job.star(3)
    assert complain(ranks[2], ranks) >= NO_PROGRESS_REPORTS
    assert [rank.wait() for rank in ranks] == [(1, STUCK.format("no progress"))] * 3


def test_a_complaint_goes_to_rank_0_which_is_asked_itself(job: Job) -> None:
    rank, peers = job.alone(2, [0], ANSWER)
    rank.monitor.report_no_progress(1, "no progress", 1)
    assert [peers[0].hear(), peers[0].hear()] == [NoProgress(1, "no progress", 1), Ping()]


def test_reports_after_rank_0_has_left_are_decided_here(job: Job) -> None:
    rank, peers = job.alone(2, [0])
    peers[0].say(Bye())
    peers[0].channel.close()
    wait_until(lambda: not rank.monitor.peers(), "the good-bye")
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        assert rank.failures == []
        rank.monitor.report_no_progress(1, "no progress", times)
    assert rank.wait() == (1, STUCK.format("no progress"))


def test_a_member_that_asks_makes_rank_0_ask_everybody(job: Job) -> None:
    """Rank 2 waits for rank 1 and cannot ask it; rank 0 can."""
    rank, peers = job.alone(0, [1, 2], ANSWER)
    rank.seen[1] = STOPPED
    peers[2].say(Ping())
    assert isinstance(peers[2].hear(), Pong)
    assert peers[2].hear() == Ping()
    peers[2].say(Pong(""))
    assert peers[1].hear() == Ping()
    assert rank.wait() == (1, STOPPED)


def test_a_peer_with_an_unanswered_ping_is_not_pinged_again(job: Job) -> None:
    rank, peers = job.alone(0, [1])
    for _ in range(5):
        rank.monitor.probe()
    assert peers[1].hear() == Ping()
    peers[1].say(Ping())
    assert isinstance(peers[1].hear(), Pong)
    assert peers[1].heard_nothing()
    peers[1].say(Pong("here"))
    wait_until(lambda: 1 in rank.monitor.call_sites, "the answer")
    rank.monitor.probe()
    assert peers[1].hear() == Ping()


def test_a_members_report_goes_to_rank_0_whose_word_counts(job: Job) -> None:
    rank, peers = job.alone(1, [0])
    rank.monitor.report(2, "I saw it fail")
    assert peers[0].hear() == FailureReport(2, "I saw it fail", False)
    peers[0].say(Failure(3, "it was the first"))
    assert rank.wait() == (3, "it was the first")


def test_a_member_whose_rank_0_answers_and_never_decides_decides_itself(job: Job) -> None:
    rank, peers = job.alone(1, [0], ANSWER * 2)
    rank.monitor.report(2, "I saw it fail")
    rank.monitor.report(3, "and this one")
    while not rank.failed.is_set():
        if peers[0].heard_nothing():
            rank.failed.wait(0.005)
        elif peers[0].hear() == Ping():
            peers[0].say(Pong("train.py:0"))
    assert rank.wait() == (2, "I saw it fail")


def test_a_member_whose_rank_0_is_stopped_accuses_rank_0(job: Job) -> None:
    rank, peers = job.alone(1, [0], ANSWER)
    rank.seen[0] = STOPPED
    rank.monitor.report(2, "I saw it fail")
    assert rank.wait() == (0, STOPPED)
    assert peers[0].hear() == FailureReport(2, "I saw it fail", False)


def test_a_member_whose_rank_0_is_gone_in_good_order_decides_itself(job: Job) -> None:
    rank, peers = job.alone(1, [0])
    peers[0].say(Bye())
    peers[0].channel.close()
    wait_until(lambda: not rank.monitor.peers(), "the good-bye")
    rank.monitor.report(2, "I saw it fail", suspected=True)
    assert rank.wait() == (2, "I saw it fail")


def test_good_bye_and_then_the_end_is_no_failure(job: Job) -> None:
    ranks = job.star(3)
    for rank in (ranks[1], ranks[0], ranks[2]):
        rank.leave()
    assert [rank.failures for rank in ranks] == [[], [], []]


def test_a_rank_that_left_is_neither_asked_nor_missed(job: Job) -> None:
    ranks = job.star(3, ANSWER)
    ranks[1].leave()
    wait_until(lambda: 1 not in ranks[0].monitor.peers(), "the good-bye")
    ranks[0].monitor.probe()
    wait_until(lambda: 2 in ranks[0].monitor.call_sites, "the answer")
    threading.Event().wait(ANSWER * 2)
    assert 1 not in ranks[0].looked_at
    assert ranks[0].failures == []
    ranks[2].monitor.report(1, "it had left before")
    assert ranks[0].wait() == ranks[2].wait() == (1, "it had left before")


def test_a_suspicion_is_believed_if_no_rank_can_be_asked(job: Job) -> None:
    rank, _ = job.alone(0, [])
    rank.monitor.report(1, "made no progress", suspected=True)
    assert rank.wait() == (1, "made no progress")


def test_a_suspicion_is_settled_when_the_asked_ranks_leave(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2])
    rank.monitor.report(1, "made no progress", suspected=True)
    assert peers[1].hear() == peers[2].hear() == Ping()
    peers[2].say(Pong("train.py:2"))
    peers[1].say(Bye())
    assert rank.wait() == (1, "made no progress")


def test_several_ranks_that_die_in_one_moment_leave_rank_0_on_watch(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        rank, peers = job.alone(0, [1, 2, 3, 4], start=False)
        for peer in (1, 2, 3):
            peers[peer].channel.close()
        rank.monitor.start()
        assert rank.wait()[1] == KILLED
        assert peers[4].hear() == Failure(*rank.failures[0])
        peers[4].say(Ping())
        assert isinstance(peers[4].hear(), Pong)
    assert caplog.text == ""


def assert_asleep(rank: Rank) -> None:
    """The liveness monitor does not go round and round."""
    before = rank.polls.count
    threading.Event().wait(0.2)
    assert rank.polls.count - before < 10


def test_a_member_whose_report_found_rank_0_dead_sleeps_afterwards(job: Job) -> None:
    rank, peers = job.alone(1, [0], ANSWER)

    def close_and_report() -> None:  # on the monitor's thread, so that the sending is what notices
        peers[0].channel.close()
        rank.monitor.report(2, "failed")

    rank.on_dump = close_and_report
    peers[0].say(DumpRequest("stall", "it is slow"))
    assert rank.wait() == (0, KILLED)
    threading.Event().wait(ANSWER * 2 + 0.05)
    assert_asleep(rank)


def test_a_question_after_the_failure_does_not_keep_the_watch_awake(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2], ANSWER)
    rank.monitor.report(1, "failed")
    rank.wait()
    peers[2].say(Ping())  # asked before it heard the failure; rank 1 will never answer
    threading.Event().wait(ANSWER + 0.05)
    assert_asleep(rank)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4type\xa5Order"])
def test_a_message_that_is_none_is_that_peers_failure(job: Job, body: bytes) -> None:
    rank, peers = job.alone(0, [1, 2])
    peers[1].channel.send(body)
    reported, reason = rank.wait()
    assert reported == 1
    assert reason.startswith("it sent an invalid message")
    assert peers[2].hear() == Failure(1, reason)
    assert peers[1].hear() is None


def test_a_huge_length_is_that_peers_failure(job: Job) -> None:
    rank, peers = job.alone(0, [1, 2])
    peers[1].channel.socket.send(b"\xff\xff\xff\xff")
    assert rank.wait()[0] == 1
    assert isinstance(peers[2].hear(), Failure)


def test_several_messages_in_one_piece(job: Job) -> None:
    rank, peers = job.alone(1, [0])
    pieces = b"".join(frame(encode(message)) for message in (Ping(), Ping(), Failure(2, "w"), Bye()))
    peers[0].channel.socket.send(pieces)
    assert rank.wait() == (2, "w")
    wait_until(lambda: not rank.monitor.peers(), "the good-bye")
    assert [type(peers[0].hear()) for _ in range(3)] == [Pong, Pong, type(None)]


def test_leaving_says_good_bye_ends_the_thread_and_closes_the_connections(job: Job) -> None:
    rank, peers = job.alone(1, [0])
    rank.leave()
    assert [peers[0].hear(), peers[0].hear()] == [Bye(), None]
    assert "horovod-liveness" not in [thread.name for thread in threading.enumerate()]
    assert rank.links[0].fileno() == -1


def test_leaving_before_the_start_gives_everything_back() -> None:
    own, other = socket.socketpair()
    with other:
        LivenessMonitor(
            1,
            LivenessTree(2),
            {0: Channel(Connection(own))},
            LONG,
            0,
            str,
            lambda rank: None,
            str,
            lambda rank, reason, cause: None,
        ).leave()
        assert other.recv(1) == b""


def test_messages_after_leaving_are_ignored(job: Job) -> None:
    rank, _ = job.alone(1, [0])
    rank.leave()
    with socket.socket() as placeholder:  # what may be open now belongs to others
        assert placeholder.fileno() >= 0
        assert rank.failures == []


def test_leaving_while_the_other_side_does_the_same(job: Job) -> None:
    for _ in range(50):
        ranks = job.star(3)
        threads = [threading.Thread(target=rank.leave) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
            assert not thread.is_alive()
        assert [rank.failures for rank in ranks] == [[], [], []]


def test_a_bug_in_the_watch_itself_is_told_to_everybody(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    rank, peers = job.alone(0, [1])

    def broken() -> str:
        raise RuntimeError("no idea where")

    rank.where = broken
    peers[1].say(Ping())
    assert rank.wait() == (0, "its liveness monitor failed: RuntimeError('no idea where')")
    assert peers[1].hear() == Failure(0, rank.failures[0][1], ENGINE)
    assert "the liveness monitor of rank 0 failed" in caplog.text


def test_the_descriptors_that_a_forked_child_must_close_are_listed(job: Job) -> None:
    rank, _ = job.alone(0, [1, 2])
    descriptors = rank.monitor.descriptors()
    assert len(set(descriptors)) == 4
    for descriptor in descriptors:
        os.fstat(descriptor)


def test_nothing_is_sent_while_all_is_well(job: Job) -> None:
    _, peers = job.alone(0, [1, 2], ANSWER)
    threading.Event().wait(ANSWER * 3)
    assert all(peer.heard_nothing() for peer in peers.values())


def test_a_question_right_before_the_good_bye_is_no_failure(job):
    """The answer cannot be sent any more, but what the other side said before it closed is still to be read."""
    rank, peers = job.alone(1, [0], start=False)
    peers[0].say(Ping())
    peers[0].say(Bye())
    peers[0].channel.close()
    rank.monitor.start()
    wait_until(lambda: not rank.monitor.peers(), "the end")
    rank.leave()
    assert rank.failures == []
