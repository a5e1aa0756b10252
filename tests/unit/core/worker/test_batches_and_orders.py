"""Which requests travel together as one batch, and what announcements and orders contain."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from connections import frame
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Definition,
    Operation,
    Order,
    encode,
)
from horovod.core.requests.handle import Handle
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    SECONDS,
    Rank,
    Set,
    allreduce_request,
    await_decision,
    hold,
    ones,
    wait,
)


def busy_then(ranks: Sequence[Rank], submit: Callable[[Rank], list[Handle]]) -> None:
    """Submit while the coordinator's worker thread is in a collective; wait for the end of all."""
    begun, go_on = hold(ranks[0])
    handles = [rank.allreduce("first", ones()) for rank in ranks]
    assert begun.wait(SECONDS)
    for rank in ranks[1:]:
        handles += submit(rank)
    handles += submit(ranks[0])
    threading.Event().wait(0.05)  # the members' announcements wait in the sockets by then
    ranks[0].communicator.before = lambda: None
    go_on.set()
    wait(*handles)


def test_requests_that_gather_while_the_worker_is_busy_are_batched(process_set: Set) -> None:
    ranks = process_set.whole(2)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(20)])
    for rank in ranks:
        assert sum(rank.communicator.batches) == 21
        assert max(rank.communicator.batches) > 1
    assert ranks[0].communicator.batches == ranks[1].communicator.batches


def test_no_rank_starts_a_batch_before_its_order_is_fully_sent(process_set: Set) -> None:
    """The order is longer than the socket holds, and the other rank is slow to read it."""
    rank, peers = process_set.part(0, 2, send_buffer=4096)
    requests = [allreduce_request(f"{number}".zfill(100), transient=True) for number in range(300)]
    lock = threading.Lock()
    arrived: list[int] = []
    begun: list[tuple[int, int]] = []

    def listen() -> int:
        """How many batches the other rank knows when it has read what was sent."""
        with lock:
            arrived.extend(map(len, peers[1].ordered_by_now()))
            return len(arrived)

    rank.communicator.before = lambda: begun.append((len(begun) + 1, listen()))
    handles = [rank.submit(each, ones(1, 1)) for each in requests]
    peers[1].say(Announce([Definition(-1, each) for each in requests]))
    wait_until(lambda: select.select([peers[1].channel], [], [], 0)[0], "the first piece of the order")
    assert listen() == 0, "the order fits into the socket"
    wait_until(lambda: listen() and sum(arrived) == len(requests), "the whole order")
    wait(*handles)
    assert begun and all(known >= number for number, known in begun)


def test_no_batch_is_larger_than_the_threshold(process_set: Set) -> None:
    ranks = process_set.whole(2, fusion_threshold=3 * 16)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(20)])
    assert max(ranks[0].communicator.batches) <= 3
    assert sum(ranks[0].communicator.batches) == 21


@pytest.mark.parametrize("settings", [{"fusion_threshold": 0}, {"disable_group_fusion": True}])
def test_fusion_that_is_turned_off(process_set: Set, settings: dict[str, Any]) -> None:
    ranks = process_set.whole(2, **settings)
    busy_then(ranks, lambda rank: [rank.allreduce(f"n{number}", ones()) for number in range(10)])
    assert ranks[0].communicator.batches == ranks[1].communicator.batches == [1] * 11


def test_requests_of_different_keys_are_not_batched_together(process_set: Set) -> None:
    ranks = process_set.whole(2)
    ops = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVERAGE]

    def submit(rank: Rank) -> list[Handle]:
        return [rank.allreduce(f"n{number}", ones(number), ops[number % 3]) for number in range(12)]

    busy_then(ranks, submit)
    assert max(ranks[0].communicator.batches) <= 4


def test_a_gathering_window_waits_for_more(process_set: Set) -> None:
    ranks = process_set.whole(2, cycle_time=timedelta(seconds=1))
    await_both = await_decision(ranks[0], 2)
    handles = [rank.allreduce("a", ones()) for rank in ranks]
    await_both()
    handles += [rank.allreduce("b", ones()) for rank in ranks]
    wait(*handles)
    assert ranks[0].communicator.batches == ranks[1].communicator.batches == [2]


def test_a_repeated_request_is_announced_in_a_few_bytes(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    request = allreduce_request("a.rather.long.name.of.a.layer", (4,))
    decision = Decision(0, request.name, request.operation)
    for turn in range(3):
        handle = rank.submit(request, ones())
        assert peers[0].announced() == ([Definition(0, request)] if turn == 0 else [0])
        peers[0].say(Order([[decision if turn == 0 else 0]]))
        wait(handle)


def test_the_coordinator_orders_in_full_once_and_then_by_number(process_set: Set) -> None:
    rank, peers = process_set.part(0, 2)
    request = allreduce_request("x", (4,))
    for turn in range(3):
        handle = rank.submit(request, ones())
        peers[1].say(Announce([Definition(0, request)] if turn == 0 else [0]))
        ((item,),) = peers[1].ordered()
        if turn == 0:
            assert item.name == "x"
            known = item.identifier
        else:
            assert item == known
        wait(handle)


def test_several_orders_in_one_piece(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2)
    handles = [rank.allreduce(name, ones()) for name in "abc"]
    orders = [encode(Order([[Decision(-1, name, Operation.ALLREDUCE)]])) for name in "abc"]
    peers[0].channel.socket.sendall(b"".join(map(frame, orders)))
    wait(*handles)


def test_a_burst_of_announcements_does_not_wait_for_a_peer_that_reads_slowly(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2, send_buffer=4096)
    names = [f"{number:04}" + "x" * 2000 for number in range(500)]
    for name in names:
        rank.submit(allreduce_request(name), ones(1, 1))
    heard: list[str] = []
    while len(heard) < len(names):
        heard += [item.request.name for item in peers[0].announced()]
    assert heard == names
