"""Peers that send invalid messages, or close their connection."""

from __future__ import annotations

import threading

import pytest

from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Announce,
    Definition,
    Leave,
    Order,
    Stop,
    encode,
)
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    Set,
    allreduce_request,
    error_of,
    ones,
)

BAD = [b"", b"\xc1", b"\x91\x00", encode(Stop(0, "not yours to say")), encode([0, [1.5]])]
MEANINGLESS = [
    encode([0, [[0, [42, "x", []]]]]),
    encode([0, [[0, [0, "x", [["x", 99, [4]]]]]]]),
    encode([0, [[0, [0, "x", [["x", 7, [4]]], 77]]]]),
]
"""An operation, a type and a reduction that do not exist."""
UNDEFINED = [
    Announce([3]),
    Announce([Definition(1 << 30, allreduce_request("x"))]),
    Announce([Definition(0, allreduce_request("x")), 0]),
]


@pytest.mark.parametrize("body", [*BAD, *MEANINGLESS])
def test_a_member_that_sends_what_is_no_message_is_cut_off_and_suspected(process_set: Set, body: bytes) -> None:
    rank, peers = process_set.part(0, 3)
    peers[1].channel.send(body)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (1, True)
    assert "it broke the protocol" in reason
    assert not rank.worker.join(0)


@pytest.mark.parametrize("message", UNDEFINED)
def test_a_member_that_breaks_the_protocol_is_cut_off_and_suspected(process_set: Set, message: Announce) -> None:
    """A number that was never defined, one beyond the capacity, a name announced twice."""
    rank, peers = process_set.part(0, 3)
    peers[2].say(message)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (2, True)
    assert "it broke the protocol" in reason


@pytest.mark.parametrize("body", [*BAD[:3], encode(Leave("not yours to say")), encode(Order([[5]]))])
def test_a_coordinator_that_breaks_the_protocol_is_cut_off_and_suspected(process_set: Set, body: bytes) -> None:
    rank, peers = process_set.part(1, 2)
    handle = rank.allreduce("x", ones())
    peers[0].announced()
    peers[0].channel.send(body)
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (0, True)
    assert "it broke the protocol" in reason
    later = rank.allreduce("y", ones())  # nobody to tell, and no reason to fail
    rank.worker.abort(HorovodInternalError("the failure"))
    assert error_of(handle) == error_of(later) == "the failure"
    assert len(rank.watch.reports) == 1


def test_a_huge_length_is_cut_off_and_suspected(process_set: Set) -> None:
    rank, peers = process_set.part(0, 2)
    peers[1].channel.socket.send(b"\xff\xff\xff\xff")
    wait_until(lambda: rank.watch.reports, "the report")
    assert rank.watch.reports[0][::2] == (1, True)


@pytest.mark.parametrize("index", [0, 1])
def test_a_channel_that_closes_is_suspected(process_set: Set, index: int) -> None:
    rank, peers = process_set.part(index, 2)
    (peer,) = peers
    peers[peer].channel.close()
    wait_until(lambda: rank.watch.reports, "the report")
    ((who, reason, suspected),) = rank.watch.reports
    assert (who, suspected) == (peer, True)
    assert "its control connection broke" in reason
    assert not rank.worker.join(0)


def test_submitting_to_a_coordinator_that_has_gone_accuses_only_the_coordinator(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2, start=False)
    peers[0].channel.close()
    first = rank.allreduce("x", ones())
    rank.worker.start()
    wait_until(lambda: rank.watch.reports, "the report")
    second = rank.allreduce("y", ones())
    rank.worker.leave("done")
    threading.Event().wait(0.05)
    assert [report[0] for report in rank.watch.reports] == [0]
    rank.worker.abort(HorovodInternalError("rank 0 failed"))
    assert error_of(first) == error_of(second) == "rank 0 failed"


def test_messages_before_the_coordinator_closed_are_read(process_set: Set) -> None:
    """It stopped in good order and was gone before this rank had announced its next wish."""
    rank, peers = process_set.part(1, 2, start=False)
    peers[0].say(Stop(0, "it is done"))
    peers[0].channel.close()
    handle = rank.allreduce("x", ones())
    rank.worker.start()
    assert "This was caused by rank 0: it is done" in error_of(handle)
    assert rank.worker.join(SOON)
    assert rank.watch.reports == []


def test_a_member_that_leaves_when_the_coordinator_is_gone_ends_with_the_abort(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    peers[0].channel.close()
    wait_until(lambda: rank.watch.reports, "the report")
    rank.worker.leave("done")
    rank.worker.abort(HorovodInternalError("rank 0 failed"))
    assert rank.worker.join(SOON)
    assert len(rank.watch.reports) == 1
