"""The transport alone: framing, flow in both directions, and each way in which a peer can fail."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cut_network import in_a_cut_network
from engines import host_pair, loopback_pair, tcp_sockets
from horovod._base.silent_host import silent_host_reason
from horovod.comm.base import Aborted, PeerFailure, Stall
from horovod.comm.exchange.base import HEADER, MAGIC, CollectiveKind
from horovod.comm.tcp.transport import TcpExchange
from time_limits import SOON


def frame(payload: bytes, collective: int = CollectiveKind.ALLREDUCE, number: int = 1) -> bytes:
    return HEADER.pack(MAGIC, collective, number, len(payload)) + payload


@pytest.fixture
def stall_seconds() -> float:
    """How long the peer of ``key`` may move no byte."""
    return 0.3


@pytest.fixture(params=[socket.socketpair, loopback_pair, host_pair], ids=["unix", "tcp", "hosts"])
def key(request: pytest.FixtureRequest, stall_seconds: float) -> Iterator[tuple[TcpExchange, socket.socket]]:
    """An exchange whose only peer, rank 1, is the other end of a socket in the test's hands."""
    own, other = request.param()
    exchange = TcpExchange({1: own}, timedelta(seconds=stall_seconds))
    exchange.begin(CollectiveKind.ALLREDUCE)
    try:
        yield exchange, other
    finally:
        exchange.close()
        other.close()


def test_what_is_sent(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    exchange.wait([exchange.send(1, memoryview(b"abc"), memoryview(b""), memoryview(b"de")), exchange.send(1)])
    assert other.recv(100) == frame(b"abcde") + frame(b"")


def test_what_is_received(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    first, second = bytearray(2), bytearray(3)
    mark = exchange.receive(1, memoryview(first), memoryview(second))
    empty = exchange.receive(1)
    other.sendall(frame(b"abcde") + frame(b"") + b"more than was asked for")
    exchange.wait([mark, empty])
    assert (bytes(first), bytes(second)) == (b"ab", b"cde")


def test_a_transfer_may_arrive_byte_by_byte(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    buffer = bytearray(5)
    mark = exchange.receive(1, memoryview(buffer))

    def dribble() -> None:
        for byte in frame(b"abcde"):
            other.sendall(bytes([byte]))
            time.sleep(0.002)

    thread = threading.Thread(target=dribble)
    thread.start()
    exchange.wait([mark])
    thread.join()
    assert bytes(buffer) == b"abcde"


def test_many_buffers_in_one_transfer(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    exchange.wait([exchange.send(1, *(memoryview(bytes([n % 256])) for n in range(3000)))])
    expected = frame(bytes(n % 256 for n in range(3000)))
    assert other.recv(len(expected), socket.MSG_WAITALL) == expected
    buffers = [bytearray(1) for _ in range(3000)]
    mark = exchange.receive(1, *map(memoryview, buffers))
    other.sendall(expected)
    exchange.wait([mark])
    assert b"".join(buffers) == expected[HEADER.size :]


def test_everyone_sends_first_far_more_than_the_kernel_holds() -> None:
    size, length = 3, 8 << 20
    exchanges = [TcpExchange(sockets, timedelta(seconds=30)) for sockets in tcp_sockets(size, socket.socketpair)]
    received = [{peer: bytearray(length) for peer in range(size) if peer != rank} for rank in range(size)]

    def run(rank: int) -> None:
        exchange = exchanges[rank]
        exchange.begin(CollectiveKind.ALLTOALL)
        data = memoryview(bytes([rank]) * length)
        marks = [exchange.send(peer, data) for peer in received[rank]]
        marks += [exchange.receive(peer, memoryview(buffer)) for peer, buffer in received[rank].items()]
        exchange.wait(marks)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert all(buffer == bytes([peer]) * length for buffers in received for peer, buffer in buffers.items())
    for exchange in exchanges:
        exchange.close()


def test_transfers_take_the_connections_to_a_peer_in_turn() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    first, *others = (own for own, _ in pairs)
    exchange = TcpExchange({1: first}, timedelta(seconds=5), more={1: others})
    exchange.begin(CollectiveKind.ALLREDUCE)
    exchange.wait([exchange.send(1, memoryview(bytes([number]))) for number in range(5)])
    assert [far.recv(1000) for _, far in pairs] == [
        frame(b"\0") + frame(b"\3"), frame(b"\1") + frame(b"\4"), frame(b"\2"),
    ]  # fmt: skip
    received = [bytearray(1) for _ in range(5)]
    marks = [exchange.receive(1, memoryview(buffer)) for buffer in received]
    pairs[2][1].sendall(frame(b"\2"))
    pairs[1][1].sendall(frame(b"\1") + frame(b"\4"))
    exchange.wait([marks[1], marks[2], marks[4]])  # what comes late on one connection holds up no other
    pairs[0][1].sendall(frame(b"\0") + frame(b"\3"))
    exchange.wait(marks)
    assert b"".join(received) == bytes(range(5))
    exchange.close()
    assert [far.recv(1) for _, far in pairs] == [b""] * 3
    for _, far in pairs:
        far.close()


def test_a_peer_that_takes_nothing_for_long_is_no_broken_network() -> None:
    """Its host acknowledges what arrives, as when its script computes."""
    own, other = loopback_pair()
    data = memoryview(bytes(16 << 20))
    told: list[Stall] = []
    readers: list[threading.Thread] = []

    def read() -> None:
        left = len(frame(b"")) + len(data)
        while left:
            left -= len(other.recv(1 << 20))

    def bear(stall: Stall) -> None:
        told.append(stall)
        if len(told) == 6:
            readers.append(threading.Thread(target=read))
            readers[0].start()

    exchange = TcpExchange({1: own}, timedelta(seconds=0.3), bear)
    exchange.begin(CollectiveKind.ALLREDUCE)
    exchange.wait([exchange.send(1, data)])
    readers[0].join()
    assert len(told) >= 6
    exchange.close()
    other.close()


@pytest.mark.parametrize("wanted", ["receive", "send"])
def test_a_silent_peer(key: tuple[TcpExchange, socket.socket], wanted: str) -> None:
    exchange, _ = key
    mark = exchange.receive(1) if wanted == "receive" else exchange.send(1, memoryview(bytes(64 << 20)))
    with pytest.raises(PeerFailure, match="made no progress") as failure:
        exchange.wait([mark])
    assert (failure.value.rank, failure.value.suspected) == (1, True)


@pytest.mark.parametrize("waiting", ["for an answer", "to send", "for an answer to what was not acknowledged"])
def test_a_host_that_is_silent_is_named_with_the_connection_however_that_is_found(waiting: str) -> None:
    """Here the kernel ends the connection long before the exchange would look at it by itself."""
    found = in_a_cut_network(
        f"""
        exchange = TcpExchange({{1: own}}, timedelta(seconds=300))
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        exchange.begin(CollectiveKind.ALLREDUCE)
        sent = exchange.send(1, memoryview(bytes({"64 << 20" if waiting == "to send" else "1000"})))
        if {waiting == "for an answer"}:
            exchange.wait([sent])
        cut()
        try:
            exchange.wait([sent if {waiting == "to send"} else exchange.receive(1)])
        except PeerFailure as failure:
            print(failure.rank, failure.suspected, failure.reason)
        """
    )
    assert found == f"1 True {silent_host_reason('from 127.0.0.1 to 127.0.0.2')}\n"


def test_a_tolerated_stall_is_reported_repeatedly_until_it_ends() -> None:
    own, other = socket.socketpair()
    told: list[Stall] = []

    def bear(stall: Stall) -> None:
        told.append(stall)
        data = frame(b"ab")
        if len(told) == 2:
            other.sendall(data[:3])  # progress, after which it is counted anew
        if len(told) == 5:
            other.sendall(data[3:])

    exchange = TcpExchange({1: own}, timedelta(seconds=0.05), bear)
    exchange.begin(CollectiveKind.ALLREDUCE)
    buffer = bytearray(2)
    exchange.wait([exchange.receive(1, memoryview(buffer))])
    assert bytes(buffer) == b"ab"
    assert [(stall.rank, stall.times) for stall in told] == [(1, 1), (1, 2), (1, 1), (1, 2), (1, 3)]
    exchange.close()
    other.close()


@pytest.mark.parametrize("size", [6, 100_000])
def test_slow_is_not_silent(key: tuple[TcpExchange, socket.socket], size: int) -> None:
    """Longer than the timeout in all, but never without progress for so long."""
    exchange, other = key
    sent, buffer = os.urandom(size), bytearray(size)
    mark = exchange.receive(1, memoryview(buffer))

    def slowly() -> None:
        data = frame(sent)
        for begin in range(0, len(data), len(data) // 5):
            time.sleep(0.1)
            other.sendall(data[begin : begin + len(data) // 5])

    thread = threading.Thread(target=slowly)
    thread.start()
    exchange.wait([mark])
    thread.join()
    assert bytes(buffer) == sent


def test_between_hosts_few_packets_at_a_time_wake_nobody() -> None:
    own, other = host_pair()
    polls = CountingPoll(select.epoll())
    with patch.object(select, "epoll", lambda: polls):
        exchange = TcpExchange({1: own}, timedelta(seconds=SOON))
    exchange.begin(CollectiveKind.ALLREDUCE)
    data = frame(os.urandom(1 << 20))
    buffer = bytearray(1 << 20)
    mark = exchange.receive(1, memoryview(buffer))

    def slowly() -> None:
        for begin in range(0, len(data), 4096):
            other.sendall(data[begin : begin + 4096])
            time.sleep(0.0005)  # as on a slow network

    thread = threading.Thread(target=slowly)
    thread.start()
    exchange.wait([mark])
    thread.join()
    assert data.endswith(buffer)
    assert polls.count <= 40  # 256 packets, but 16 times 64 KB
    exchange.close()
    other.close()


def test_another_header_is_found_at_once_though_much_more_is_awaited() -> None:
    own, other = host_pair()
    exchange = TcpExchange({1: own}, timedelta(hours=1))
    exchange.begin(CollectiveKind.ALLREDUCE)
    mark = exchange.receive(1, memoryview(bytearray(1 << 20)))
    other.sendall(frame(b"abc"))
    with pytest.raises(PeerFailure, match="3 bytes"):
        exchange.wait([mark])
    exchange.close()
    other.close()


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), min_size=1, max_size=8),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
@settings(deadline=None)
def test_a_wait_ends_when_its_transfers_are_there_however_they_arrive(
    transfers: list[tuple[int, bool]], portions: list[int]
) -> None:
    """The peer sends nothing beyond what this rank waits for, in any portions.

    Args:
        transfers: the size of each, and whether this rank waits for it before the peer sends the next one.
    """
    own, other = host_pair()
    exchange = TcpExchange({1: own}, timedelta(seconds=SOON))
    exchange.begin(CollectiveKind.ALLREDUCE)
    contents = [os.urandom(size) for size, _ in transfers]
    buffers = [bytearray(size) for size, _ in transfers]
    goes_on = threading.Semaphore(0)

    def send() -> None:
        turns = cycle(portions)
        for content, (_, awaited) in zip(contents, transfers, strict=True):
            data = frame(content)
            while data:
                portion = next(turns)
                other.sendall(data[:portion])
                data = data[portion:]
            if awaited:
                assert goes_on.acquire(timeout=SOON)

    marks = [exchange.receive(1, memoryview(buffer)) for buffer in buffers]
    thread = threading.Thread(target=send)
    thread.start()
    pending = []
    for mark, (_, awaited) in zip(marks, transfers, strict=True):
        pending.append(mark)
        if awaited:
            exchange.wait(pending)
            pending.clear()
            goes_on.release()
    exchange.wait(pending)
    thread.join()
    assert buffers == contents
    exchange.close()
    other.close()


def test_the_silent_one_of_several_is_named() -> None:
    pairs = {rank: socket.socketpair() for rank in (0, 1, 3)}
    exchange = TcpExchange({rank: own for rank, (own, _) in pairs.items()}, timedelta(seconds=0.2))
    exchange.begin(CollectiveKind.ALLREDUCE)
    marks = [exchange.receive(rank) for rank in pairs]
    for rank in (0, 3):
        pairs[rank][1].sendall(frame(b""))
    with pytest.raises(PeerFailure) as failure:
        exchange.wait(marks)
    assert failure.value.rank == 1
    exchange.close()
    for _, other in pairs.values():
        other.close()


@pytest.mark.parametrize("stall_seconds", [SOON])
@pytest.mark.parametrize("wanted", ["receive", "send"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_peer_that_leaves(
    key: tuple[TcpExchange, socket.socket], wanted: str, when: str, stall_seconds: float
) -> None:
    exchange, other = key
    mark = exchange.receive(1) if wanted == "receive" else exchange.send(1, memoryview(bytes(64 << 20)))
    timer = threading.Timer(0.05, lambda: other.shutdown(socket.SHUT_RDWR))
    if when == "before":
        other.close()
    else:
        timer.start()
    with pytest.raises(PeerFailure, match="connection") as failure:
        exchange.wait([mark])
    assert (failure.value.rank, failure.value.suspected) == (1, False)
    if when == "during":
        timer.join()


@pytest.mark.parametrize("connect", [socket.socketpair, loopback_pair])
def test_a_peer_that_was_gone_from_the_start(connect: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    own, other = connect()
    own.sendall(b"never read, so that the connection is reset")
    other.close()
    exchange = TcpExchange({1: own}, timedelta(seconds=5))
    exchange.begin(CollectiveKind.ALLREDUCE)
    mark = exchange.receive(1)
    with pytest.raises(PeerFailure, match="connection") as failure:
        exchange.wait([mark])
    assert failure.value.rank == 1
    exchange.close()


def test_what_a_peer_sent_before_it_left_is_received(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    buffer = bytearray(3)
    other.sendall(frame(b"abc"))
    other.close()
    exchange.wait([exchange.receive(1, memoryview(buffer))])
    assert bytes(buffer) == b"abc"


class CountingPoll:
    """An epoll object that counts how often it was asked."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll
        self.count = 0

    def poll(self, timeout: float) -> Any:
        self.count += 1
        return self._epoll.poll(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


def test_a_peer_that_is_done_and_closed_is_no_error() -> None:
    """Rank 1 leaves while only rank 2 is waited for: no failure, and no busy loop."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    polls = CountingPoll(select.epoll())
    with patch.object(select, "epoll", lambda: polls):
        exchange = TcpExchange({rank: own for rank, (own, _) in pairs.items()}, timedelta(seconds=5))
    exchange.begin(CollectiveKind.ALLREDUCE)
    pairs[1][1].sendall(frame(b""))
    exchange.wait([exchange.receive(1)])
    pairs[1][1].close()
    timer = threading.Timer(0.2, lambda: pairs[2][1].sendall(frame(b"")))
    timer.start()
    before = polls.count
    exchange.wait([exchange.receive(2)])
    timer.join()
    assert polls.count - before <= 4
    with pytest.raises(PeerFailure) as failure:
        exchange.wait([exchange.receive(1)])
    assert failure.value.rank == 1
    exchange.close()
    pairs[2][1].close()


def test_a_peer_that_runs_ahead_is_left_alone(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    other.sendall(frame(b"", number=1) + frame(b"abc", number=2))
    exchange.wait([exchange.receive(1)])
    exchange.begin(CollectiveKind.ALLREDUCE)
    buffer = bytearray(3)
    exchange.wait([exchange.receive(1, memoryview(buffer))])
    assert bytes(buffer) == b"abc"


GARBAGE = {
    "random bytes": (b"GET / HTTP/1.1\r\n\r\n", "not part of any collective"),
    "no such collective": (frame(b"abc", collective=99), "not part of any collective"),
    "another collective": (frame(b"abc", CollectiveKind.BROADCAST), r"broadcast number 1 \(3 bytes\) where allreduce"),
    "an earlier one": (frame(b"abc", number=0), r"allreduce number 0 \(3 bytes\) where allreduce number 1"),
    "another length": (frame(b"abcd"), r"\(4 bytes\) where allreduce number 1 \(3 bytes\)"),
    "a huge length": (HEADER.pack(MAGIC, 1, 1, 2**64 - 1), r"\(18446744073709551615 bytes\)"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(key: tuple[TcpExchange, socket.socket], kind: str) -> None:
    exchange, other = key
    data, message = GARBAGE[kind]
    mark = exchange.receive(1, memoryview(bytearray(3)))
    other.sendall(data)
    with pytest.raises(PeerFailure, match=message) as failure:
        exchange.wait([mark])
    assert (failure.value.rank, failure.value.suspected) == (1, False)


def test_the_number_of_the_collective_wraps_around(key: tuple[TcpExchange, socket.socket]) -> None:
    exchange, other = key
    exchange._number = 2**32 - 1
    exchange.begin(CollectiveKind.BARRIER)
    exchange.wait([exchange.send(1)])
    assert other.recv(100) == frame(b"", CollectiveKind.BARRIER, 0)


def test_abort_wakes_a_wait_and_stays() -> None:
    own, other = socket.socketpair()
    exchange = TcpExchange({1: own}, timedelta(seconds=60))
    exchange.begin(CollectiveKind.ALLREDUCE)
    timer = threading.Timer(0.05, exchange.abort)
    timer.start()
    mark = exchange.receive(1)
    with pytest.raises(Aborted):
        exchange.wait([mark])
    timer.join()
    with pytest.raises(Aborted):
        exchange.wait([])
    with pytest.raises(Aborted):
        exchange.begin(CollectiveKind.ALLREDUCE)
    other.sendall(b"x")  # abort closes nothing
    exchange.close()
    with pytest.raises(OSError):
        other.sendall(b"x")
    other.close()


def test_a_very_long_timeout() -> None:
    own, other = socket.socketpair()
    exchange = TcpExchange({1: own}, timedelta(days=10_000))
    exchange.begin(CollectiveKind.ALLREDUCE)
    timer = threading.Timer(0.05, lambda: other.sendall(frame(b"")))
    timer.start()
    exchange.wait([exchange.receive(1)])
    timer.join()
    exchange.close()
    other.close()


def test_close_gives_everything_back() -> None:
    process = psutil.Process()
    before = process.num_fds()
    sockets = tcp_sockets(4, loopback_pair)
    exchanges = [TcpExchange(peers, timedelta(seconds=1)) for peers in sockets]
    for exchange in exchanges:
        exchange.close()
        exchange.close()
    assert process.num_fds() == before


def test_peers_see_a_close_though_a_child_still_holds_the_sockets() -> None:
    own, other = socket.socketpair()
    exchange = TcpExchange({1: own}, timedelta(seconds=1))
    held = os.dup(own.fileno())  # as a forked child would
    exchange.close()
    assert other.recv(1) == b""
    os.close(held)
    other.close()


def test_a_forked_child_does_not_cut_its_parents_connections() -> None:
    own, other = socket.socketpair()
    exchange = TcpExchange({1: own}, timedelta(seconds=5))
    child = os.fork()
    if child == 0:
        exchange.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    exchange.begin(CollectiveKind.ALLREDUCE)
    other.sendall(frame(b""))
    exchange.wait([exchange.send(1), exchange.receive(1)])
    assert other.recv(100) == frame(b"")
    exchange.close()
    other.close()
