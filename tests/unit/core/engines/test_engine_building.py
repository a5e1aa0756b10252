"""How the members of a group talk while they choose an engine, and what happens where one of them cannot build it."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from connections import ends
from engines import group_of, loopback_pair, run_ranks
from horovod.comm.base import Communicator
from horovod.comm.engine import Bootstrap, EngineError, EngineGroup
from horovod.comm.select import engine
from horovod.comm.spans import HOST
from horovod.comm.tcp.communicator import TcpCommunicator
from horovod.control.connection import Connection
from horovod.core.engines.engine_building import build_engine
from horovod.core.engines.member_exchange import ExchangeOverCommunicator, ExchangeOverConnections
from horovod.core.negotiation.tree import Tree
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls


def test_members_talk_over_a_communicator_that_they_have_already() -> None:
    def talk(communicator: Communicator) -> tuple[list[bytes], tuple[bytes, int]]:
        exchange = ExchangeOverCommunicator(communicator)
        everybody = exchange.allgather(b"x" * communicator.rank)
        return everybody, exchange.broadcast(b"from the first" if communicator.rank == 0 else b"")

    with group_of("tcp", 3) as group:
        assert run_ranks(group, talk) == [([b"", b"x", b"xx"], (b"from the first", -1))] * 3


@pytest.mark.parametrize(("pair", "passed"), [(socket.socketpair, True), (loopback_pair, False)])
def test_a_descriptor_is_passed_where_it_can_be(pair: object, passed: bool) -> None:
    near, far = ends(pair())  # type: ignore[operator]
    deadline = time.monotonic() + SOON
    first = ExchangeOverConnections([0, 1], {1: near}, index=0, deadline=deadline)
    second = ExchangeOverConnections([0, 1], {0: far}, index=1, deadline=deadline)
    descriptor = os.memfd_create("test")
    with near, far:
        mine, theirs = ConcurrentCalls(
            lambda: first.broadcast(b"data" * 1000, descriptor), lambda: second.broadcast(b"", -1)
        ).outcomes()
    os.close(descriptor)
    assert isinstance(mine, tuple) and isinstance(theirs, tuple)
    assert mine[0] == theirs[0] == b"data" * 1000
    assert (theirs[1] >= 0) is passed
    for each in (mine[1], theirs[1]):
        if each >= 0:
            os.close(each)


@pytest.mark.parametrize("pair", [socket.socketpair, loopback_pair])
def test_a_member_that_goes_away_is_named_by_its_rank(pair: object) -> None:
    near, far = ends(pair())  # type: ignore[operator]
    exchange = ExchangeOverConnections([2, 5], {1: near}, index=0, deadline=time.monotonic() + SOON)
    far.close()
    with near, pytest.raises(ConnectionError, match=r"lost rank 5 while the ranks chose an engine: "):
        exchange.allgather(b"")


def test_a_member_that_never_answers_is_named_by_its_rank() -> None:
    near, far = ends(socket.socketpair())
    exchange = ExchangeOverConnections([2, 5], {1: near}, index=0, deadline=time.monotonic() + 0.05)
    with near, far, pytest.raises(TimeoutError, match="lost rank 5 while"):
        exchange.allgather(b"")


@pytest.mark.parametrize("hosts", ["aaaaa", "aabbb", "abbbb"], ids=["one host", "a relay", "a relay for all others"])
@pytest.mark.parametrize("lost", range(1, 5))
@pytest.mark.parametrize(
    ("pair", "how"),
    [
        (socket.socketpair, "is silent"),
        *itertools.product(
            [socket.socketpair, loopback_pair], ["is gone", *(f"is gone before {late} comes" for late in range(5))]
        ),
    ],
)
def test_all_members_name_the_one_that_is_missing(
    pair: Callable[[], tuple[socket.socket, socket.socket]], hosts: str, lost: int, how: str
) -> None:
    """Those who are not connected with it, too, even if their time is over a little earlier, or if those who know of it have
    ended before they come."""
    tree, ranks = Tree(list(hosts)), [10, 11, 12, 13, 14]
    made: dict[int, dict[int, Connection]] = {member: {} for member in range(5)}
    for parent in range(5):
        for child in tree.children(parent):
            made[parent][child], made[child][parent] = ends(pair())

    def end(member: int) -> None:
        for connection in made[member].values():
            connection.close()

    gone = how != "is silent"
    if gone:
        end(lost)
    now, seconds = time.monotonic(), 20.0 if gone else 0.5
    others = [member for member in range(5) if member != lost]

    def member(index: int) -> list[bytes]:
        deadline = now + seconds - 0.1 * index
        if how == f"is gone before {index} comes":
            time.sleep(0.05)
        try:
            return ExchangeOverConnections(ranks, made[index], index, deadline, tree).allgather(b"here")
        finally:
            if gone:
                end(index)  # as its process does

    outcomes = ConcurrentCalls(*(functools.partial(member, index) for index in others)).outcomes()
    for each in range(5):
        end(each)
    named = f"lost rank {10 + lost} while the ranks chose an engine"
    assert all(str(outcome).startswith(named) for outcome in outcomes), outcomes


def test_an_engine_that_one_member_cannot_build_is_used_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Member 1 fails to build tcp. Both hear why, and the one that was made is closed."""
    closed = threading.Event()

    def build(self: object, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> TcpCommunicator:
        if group.rank == 1:
            raise EngineError("no route to member 0")
        made = TcpCommunicator(group.rank, group.connect(), group.settings.stall_timeout)
        close = made.close
        monkeypatch.setattr(made, "close", lambda: (close(), closed.set()))
        return made

    monkeypatch.setattr(type(engine("tcp", HOST)), "build", build)
    near, far = ends(socket.socketpair())
    data, other = socket.socketpair()
    deadline = time.monotonic() + SOON

    def run(rank: int) -> Communicator:
        connections: Mapping[int, Connection] = {1: near} if rank == 0 else {0: far}
        group = EngineGroup(rank, 2, ("a", "b"), connect=lambda: {1 - rank: data})
        exchange = ExchangeOverConnections([2, 5], connections, int(rank != 0), deadline)
        return build_engine(group, exchange, "tcp", "VARIABLE", deadline)

    with near, far, other:
        for outcome in ConcurrentCalls(lambda: run(0), lambda: run(1)).outcomes():
            assert isinstance(outcome, EngineError)
            assert str(outcome) == "VARIABLE=tcp cannot serve this group: rank 5: no route to member 0"
    assert closed.is_set()
