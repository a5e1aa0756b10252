"""Reaching an address: in time or not at all, never somebody of another job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from horovod._base.running_time import RunningTime
from horovod.control import dial as dialing
from horovod.control.connection import receive_exactly
from horovod.control.dial import anywhere, describe, dial, dial_until, listening_socket, set_keepalive
from horovod.control.handshake import GREETING, HandshakeError, ServerHandshake
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls

SECRET = b"s" * 32


def soon(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


@contextmanager
def listening(name: str = "") -> Iterator[socket.socket]:
    family = socket.AF_UNIX if name else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind(name or ("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(SOON)
        yield listener


def serve_once(listener: socket.socket, secret: bytes = SECRET) -> bytes:
    """Accept one caller; its purpose."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(SOON)
        handshake = ServerHandshake(secret)
        connection.sendall(handshake.greeting)
        while True:
            data = connection.recv(4096)
            if not data:
                return b""
            reply = handshake.receive(data)
            if reply is not None:
                connection.sendall(reply)
                return handshake.purpose


@pytest.mark.parametrize("name", ["", f"\0horovod-test-dial-{os.getpid()}"], ids=["tcp", "unix"])
def test_a_dialled_connection_is_authenticated_and_blocking(name: str) -> None:
    with listening(name) as listener:
        server = ConcurrentCalls(lambda: serve_once(listener))
        with dial(name or listener.getsockname(), SECRET, b"hi", soon()) as made:
            assert made.socket.getblocking()
            assert made.socket.gettimeout() is None
        assert server.results() == [b"hi"]


def test_an_address_at_which_nothing_listens_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = closed.getsockname()
        with pytest.raises(OSError):
            dial(address, SECRET, b"", soon())
        with pytest.raises(ConnectionError, match=rf"no address answered in time .*127.0.0.1:{address[1]}"):
            dial_until([address], SECRET, b"", soon(0.05))


def test_an_address_of_another_program_is_an_error() -> None:
    with listening() as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.com ESMTP Postfix ready, what do you want?\r\n")

        server = ConcurrentCalls(speak)
        with pytest.raises(HandshakeError, match="not part of a Horovod job"):
            dial(listener.getsockname(), SECRET, b"", soon())
        server.results()


def test_another_job_listens() -> None:
    with listening() as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(SOON)
                connection.sendall(ServerHandshake(b"other").greeting)
                connection.recv(4096)
                connection.sendall(bytes(32))

        server = ConcurrentCalls(serve)
        with pytest.raises(HandshakeError, match="does not know the job's secret"):
            dial(listener.getsockname(), SECRET, b"", soon())
        server.results()


def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    with listening() as listener, pytest.raises(TimeoutError):
        dial(listener.getsockname(), SECRET, b"", soon(0.05))


def test_a_slow_starter_is_reached_in_the_end() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(SOON)

        def start_late() -> bytes:
            threading.Event().wait(0.1)
            listener.listen()
            return serve_once(listener)

        server = ConcurrentCalls(start_late)
        dial_until([listener.getsockname()], SECRET, b"late", soon()).close()
        assert server.results() == [b"late"]


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.socket() as dead, listening() as listener:
        dead.bind(("127.0.0.1", 0))
        server = ConcurrentCalls(lambda: serve_once(listener))
        made = dial_until([dead.getsockname(), listener.getsockname()], SECRET, b"", soon())
        assert made.socket.getpeername() == listener.getsockname()
        made.close()
        server.results()


def test_the_error_lists_every_address_that_was_tried() -> None:
    with pytest.raises(ConnectionError) as caught:
        dial_until(["\0horovod-test-nobody", ("127.0.0.1", 1)], SECRET, b"", soon(0.02))
    assert "unix:@horovod-test-nobody" in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    with pytest.raises(ConnectionError, match="no address was given"):
        dial_until([], SECRET, b"", soon(0.01))


def test_a_closed_door_is_no_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(ServerHandshake(b"another" * 5).greeting)
                connection.recv(1024)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(HandshakeError, match="the same secret"):
            dial(server.getsockname(), SECRET, b"", soon())
        thread.join()


def test_another_users_unix_socket_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"\0horovod-test-user-{os.getpid()}"
    with listening(name), monkeypatch.context() as patch:
        patch.setattr("horovod.control.connection.os.getuid", lambda: 1 << 20)
        with pytest.raises(HandshakeError, match="another user"):
            dial(name, SECRET, b"", soon())


def test_receive_exactly_takes_no_more_than_asked() -> None:
    own, other = socket.socketpair()
    with own, other:
        other.sendall(b"abcdef")
        assert receive_exactly(own, 4, soon()) == b"abcd"
        assert receive_exactly(own, 0, soon()) == b""
        with pytest.raises(TimeoutError):
            receive_exactly(own, GREETING, soon(0.02))
        other.close()
        with pytest.raises(ConnectionResetError):
            receive_exactly(own, 1, soon())


def test_addresses_read_well() -> None:
    assert describe(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert describe("\0abc") == "unix:@abc"


def test_an_address_that_drops_packets_does_not_block_the_next() -> None:
    with listening() as silent, listening() as good:  # the first accepts and never says a word
        server = ConcurrentCalls(lambda: serve_once(good))
        addresses: list[tuple[str, int] | str] = [silent.getsockname(), good.getsockname()]
        with dial_until(addresses, SECRET, b"hi", soon(4.0)):
            assert server.results() == [b"hi"]


def test_the_kernel_is_asked_to_notice_a_silent_host() -> None:
    with listening() as listener, socket.create_connection(listener.getsockname()) as connection:
        set_keepalive(connection, 15)
        idle, each, probes = (
            connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
            for name in ("IDLE", "INTVL", "CNT")
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + each * probes == 15


@pytest.mark.parametrize("served", ["127.0.0.1", "::1"])
def test_a_name_of_several_addresses_leads_to_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch, served: str
) -> None:
    with listening_socket(served, 0) as listener:
        listener.listen()
        listener.settimeout(SOON)
        port = listener.getsockname()[1]
        found = [*socket.getaddrinfo("::1", port), *socket.getaddrinfo("127.0.0.1", port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [each for each in found if each[1] == 1])
        server = ConcurrentCalls(lambda: serve_once(listener))
        with dial(("both", port), SECRET, b"purpose", soon()) as made:
            assert made.socket.getpeername()[0] == served
        assert server.results() == [b"purpose"]


def test_a_socket_that_takes_ipv6_takes_ipv4_too() -> None:
    assert (anywhere(["10.0.0.1"]), anywhere([]), anywhere(["fd00::1"])) == ("0.0.0.0", "0.0.0.0", "::")
    with listening_socket("::", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        for address in ("::1", "127.0.0.1"):
            socket.create_connection((address, port), 10).close()


@pytest.mark.parametrize("stopped", [True, False])
def test_time_in_which_the_process_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """The first try ends far later than it was to: the process was stopped. Or each try takes all of its time."""
    now, answered = [1000.0], object()

    def answers_the_second_try(address: object, secret: bytes, purpose: bytes, deadline: float, source: str) -> object:
        if now[0] > 1000.0 and stopped:
            return answered
        now[0] = deadline + (60.0 if stopped else 0.0)
        raise TimeoutError("timed out")

    monkeypatch.setattr(dialing, "dial", answers_the_second_try)
    monkeypatch.setattr(dialing, "running_time", RunningTime())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    if stopped:
        assert dial_until([("127.0.0.1", 1)], SECRET, b"", 1005.0) is answered
    else:
        with pytest.raises(ConnectionError, match="no address answered in time"):
            dial_until([("127.0.0.1", 1)], SECRET, b"", 1005.0)
        assert now[0] < 1006.0
