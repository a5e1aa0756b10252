"""A channel never blocks its owner, loses nothing the kernel did not take, and says when the other side is gone."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from connections import frame
from cut_network import in_a_cut_network
from horovod._base.silent_host import silent_host_reason
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, socket.socket]]:
    if request.param == "unix":
        own, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            other = socket.create_connection(listener.getsockname())
            own, _ = listener.accept()
    other.settimeout(SOON)
    channel = Channel(Connection(own))
    yield channel, other
    channel.close()
    other.close()


def receive_one(channel: Channel) -> bytes:
    found: list[bytes] = []
    wait_until(lambda: found.extend(channel.receive()) or found, "a message")
    assert len(found) == 1
    return found[0]


def read_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(1 << 16, length - len(data)))
        assert chunk
        data += chunk
    return bytes(data)


def test_a_message_arrives_in_its_frame(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    channel.send(b"hello")
    assert not channel.wants_write
    assert read_exactly(other, 9) == frame(b"hello")
    other.sendall(frame(b"back"))
    assert receive_one(channel) == b"back"


def test_nothing_there_is_no_message_and_no_error(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    assert channel.receive() == []
    other.sendall(frame(b"half a message")[:7])
    select.select([channel], [], [], 5)
    assert channel.receive() == []


def test_several_messages_at_once(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    bodies = [b"", b"a", b"b" * 1000]
    other.sendall(b"".join(map(frame, bodies)))
    found: list[bytes] = []
    wait_until(lambda: found.extend(channel.receive()) or len(found) == 3, "three messages")
    assert found == bodies


def test_data_that_the_kernel_does_not_take_is_queued_in_order(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    bodies = [bytes([number]) * 200_000 for number in range(12)]
    for body in bodies:
        channel.send(body)  # returns at once, though nobody reads
    assert channel.wants_write
    expected = b"".join(map(frame, bodies))
    received = bytearray()
    for _ in range(100_000):
        if len(received) == len(expected):
            break
        readable, writable, _ = select.select([other], [channel] if channel.wants_write else [], [], 10)
        assert readable or writable
        if writable:
            channel.flush()
        if readable:
            received += other.recv(50_000)
    assert received == expected
    assert not channel.wants_write
    channel.send(b"after")
    assert read_exactly(other, 9) == frame(b"after")


def test_a_large_message_arrives_whole(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    body = bytes(range(256)) * 8192  # 2 MiB, more than a receive takes
    other.setblocking(False)
    data, found = memoryview(frame(body)), []
    for _ in range(100_000):
        if found:
            break
        if data:
            try:
                data = data[other.send(data) :]
            except BlockingIOError:
                pass
        found += channel.receive()
    assert found == [body]


def test_the_other_side_closed(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    other.sendall(frame(b"last words"))
    other.close()
    assert receive_one(channel) == b"last words"
    with pytest.raises(ChannelClosed, match="closed"):
        for _ in range(1000):
            channel.receive()


def test_sending_to_a_closed_peer_is_an_error(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    other.close()

    def gone() -> bool:
        try:
            channel.send(b"x" * 1000)
        except ChannelClosed:
            return True
        return False

    wait_until(gone, "ChannelClosed")


def test_flushing_to_a_closed_peer_is_an_error(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    channel.send(b"x" * 10_000_000)
    assert channel.wants_write
    other.close()

    def gone() -> bool:
        try:
            channel.flush()
        except ChannelClosed:
            return True
        return False

    wait_until(gone, "ChannelClosed")


def test_a_huge_announced_length_ends_the_conversation(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    other.sendall(b"\xff\xff\xff\xff and so on")
    select.select([channel], [], [], 5)
    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        channel.receive()


def test_the_limit_is_the_owners_to_choose() -> None:
    own, other = socket.socketpair()
    with own, other:
        other.sendall(frame(b"12345"))
        with pytest.raises(ChannelClosed):
            Channel(Connection(own), limit=4).receive()


def test_a_tcp_channel_sends_small_messages_at_once(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    if channel.socket.family != socket.AF_UNIX:
        assert channel.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert channel.fileno() == channel.socket.fileno()
    assert not channel.socket.getblocking()


@pytest.mark.parametrize("silent", ["what was sent", "an idle connection"])
@pytest.mark.parametrize("told", ["by receive", "by send"])
def test_a_host_that_acknowledges_nothing_is_gone_after_a_while(silent: str, told: str) -> None:
    """Whichever call the kernel tells first, the next receive names the connection."""
    found = in_a_cut_network(
        f"""
        channel = Channel(Connection(own), reach_seconds=0.5)
        if {silent == "an idle connection"}:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        cut()
        if {silent == "what was sent"}:
            channel.send(b"are you there?")
        select.select([channel], [], [], 20)
        if {told == "by send"}:
            try:
                channel.send(b"and now?")
            except ChannelClosed:
                pass
        try:
            print("received", channel.receive())
        except ChannelClosed as error:
            print("closed:", error.network)
        """
    )
    assert found == f"closed: {silent_host_reason('from 127.0.0.1 to 127.0.0.2')}\n"
