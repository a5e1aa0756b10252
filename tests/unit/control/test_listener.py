"""The door: whoever knows the secret is let in, all others cost a bounded amount and nothing else."""

from __future__ import annotations

import ast
import os
import select
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from horovod.control import connection as connection_module
from horovod.control import listener as listener_module
from horovod.control.connection import Connection, is_same_user
from horovod.control.handshake import GREETING, MAC, ClientHandshake
from horovod.control.listener import FEWEST_FROM_ONE, LARGEST_QUEUE, ConnectionListener
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until

SECRET = b"s" * 32


class Door:
    """A listener on a loopback port, whose selector the test runs."""

    def __init__(self, name: str = "", expected: int = LARGEST_QUEUE) -> None:
        self.selector = selectors.DefaultSelector()
        if name:
            self.server_socket = socket.socket(socket.AF_UNIX)
            self.server_socket.bind(name)
            self.server_socket.listen(1024)
        else:
            self.server_socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.guests: list[tuple[Connection, bytes]] = []
        self.listener = ConnectionListener(self.selector, [self.server_socket], SECRET, self.welcome, expected=expected)
        self.clients: list[socket.socket] = []

    def welcome(self, connection: Connection, purpose: bytes) -> None:
        self.guests.append((connection, purpose))

    def turn(self, seconds: float = 0.01) -> None:
        for key, events in self.selector.select(seconds):
            key.data(events)
        self.listener.expire()

    def turn_until(self, condition: Callable[[], object], what: str) -> None:
        def turned() -> object:
            self.turn()
            return condition()

        wait_until(turned, what)

    def call(self) -> socket.socket:
        client = socket.socket(self.server_socket.family)
        self.clients.append(client)
        client.settimeout(SOON)
        client.connect(self.server_socket.getsockname())
        return client

    def pending(self) -> int:
        """How many are in their handshake."""
        return len(self.selector.get_map().keys() - {self.server_socket.fileno()})

    def close(self) -> None:
        self.listener.close()
        self.server_socket.close()
        self.selector.close()
        for connection, _ in self.guests:
            connection.close()
        for client in self.clients:
            client.close()


@contextmanager
def door(**options: object) -> Iterator[Door]:
    made = Door(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def ended(client: socket.socket) -> bool:
    """Whether the door has closed this connection."""
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def enter(at: Door, purpose: bytes = b"p") -> socket.socket:
    client = at.call()
    at.turn_until(lambda: select.select([client], [], [], 0)[0], "the greeting")  # others may be in their handshake
    handshake = ClientHandshake(SECRET, purpose)
    client.sendall(handshake.answer(client.recv(GREETING)))
    before = len(at.guests)
    at.turn_until(lambda: len(at.guests) > before, "the welcome")
    handshake.finish(client.recv(MAC))
    return client


def test_an_authenticated_client_is_passed_on_with_its_purpose() -> None:
    with door() as at:
        enter(at, b"rendezvous")
        ((connection, purpose),) = at.guests
        assert purpose == b"rendezvous"
        assert not connection.socket.getblocking()
        assert at.pending() == 0
        assert at.listener.next_deadline() is None


def test_a_wrong_secret_is_closed_without_a_word() -> None:
    with door() as at:
        client = at.call()
        at.turn_until(at.pending, "the greeting")
        client.sendall(ClientHandshake(b"wrong", b"p").answer(client.recv(GREETING)))
        at.turn_until(lambda: not at.pending(), "the refusal")
        assert client.recv(100) == b""
        assert at.guests == []


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1\r\n\r\n" * 60, b"\xff" * 34, b"\0" * 5000, bytes(66)], ids=len)
def test_rubbish_is_closed(rubbish: bytes) -> None:
    with door() as at:
        client = at.call()
        client.sendall(rubbish)
        at.turn_until(lambda: ended(client), "the end of the connection")
        assert at.guests == []
        assert at.pending() == 0


def test_a_client_that_closes_at_once_is_forgotten() -> None:
    with door() as at:
        for _ in range(20):
            at.call().close()
        at.turn_until(lambda: not at.pending(), "twenty ends")
        enter(at)
        assert len(at.guests) == 1


def test_a_client_that_resets_its_connection_is_forgotten() -> None:
    with door() as at:
        client = at.call()
        at.turn_until(at.pending, "the greeting")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        at.turn_until(lambda: not at.pending(), "the end")
        enter(at)


def test_the_silent_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.05)
    with door() as at:
        silent = at.call()
        at.turn_until(at.pending, "the greeting")
        assert at.listener.next_deadline() is not None
        at.turn_until(lambda: ended(silent), "the end of the connection")
        assert at.pending() == 0
        assert at.listener.next_deadline() is None


def test_a_thousand_half_open_connections_of_one_address_leave_room_for_the_one_that_counts() -> None:
    with door(expected=1) as at:
        for number in range(1000):
            at.call()
            if number % 50 == 49:
                at.turn()
        at.turn_until(lambda: at.pending() == FEWEST_FROM_ONE, "the last ones")
        enter(at, b"the one")
        assert [purpose for _, purpose in at.guests] == [b"the one"]
        assert sum(ended(client) for client in at.clients[:-1]) >= 1000 - FEWEST_FROM_ONE


def test_whoever_comes_while_the_queue_is_full_waits_and_nobody_is_dropped() -> None:
    """As many slow ranks of one address as are expected there, several times what the queue holds."""
    count = 3 * LARGEST_QUEUE
    with door(expected=count) as at:
        handshakes = [ClientHandshake(SECRET, b"%d" % number) for number in range(count)]
        slow = [at.call() for _ in range(count)]
        answered = 0
        while answered < count:
            at.turn_until(lambda: at.pending() == min(LARGEST_QUEUE, count - len(at.guests)), "a full queue")
            at.turn()
            assert at.pending() <= LARGEST_QUEUE
            for client, handshake in zip(slow[answered:][:100], handshakes[answered:], strict=False):
                client.sendall(handshake.answer(client.recv(GREETING)))  # the oldest were not dropped
            answered = min(count, answered + 100)
            at.turn_until(lambda: len(at.guests) == answered, "the welcome of those who have answered")  # noqa: B023
        for client, handshake in zip(slow, handshakes, strict=True):
            handshake.finish(client.recv(MAC))
        assert at.pending() == 0


def test_a_full_queue_costs_no_turns_and_opens_again_when_a_handshake_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.3)
    with door() as at:
        for _ in range(LARGEST_QUEUE + 1):
            at.call()
        at.turn_until(lambda: at.pending() == LARGEST_QUEUE, "the queue filling up")
        at.turn(0)
        assert at.selector.select(0) == []  # though one more waits in the backlog
        at.turn_until(lambda: ended(at.clients[0]), "the end of the first")
        monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", SOON)
        enter(at)


def test_closing_ends_unfinished_handshakes_and_leaves_the_listener_open() -> None:
    at = Door()
    half_open = at.call()
    at.turn_until(at.pending, "the greeting")
    at.listener.close()
    assert ended(half_open)
    assert at.server_socket.fileno() >= 0
    assert len(at.selector.get_map()) == 0
    at.server_socket.close()
    at.selector.close()
    half_open.close()


def test_a_unix_door_knows_its_own_user() -> None:
    with door(name=f"\0horovod-test-{os.getpid()}-1") as at:
        enter(at, b"mine")
        assert is_same_user(at.guests[0][0].socket)


def test_a_unix_door_refuses_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with door(name=f"\0horovod-test-{os.getpid()}-2") as at:
        monkeypatch.setattr(connection_module.os, "getuid", lambda: 1 << 20)
        stranger = at.call()
        at.turn_until(lambda: ended(stranger), "the refusal")
        assert at.pending() == 0


LISTENERS = ("ConnectionListener", "RendezvousServer")
SERVES_ANYBODY = {"runner/compute_service.py"}
"""Without ``expected``: how many trainings connect with a data service is not known."""


def test_whoever_listens_says_how_many_may_come_from_one_address() -> None:
    """If not, one address may hold the whole queue."""
    source = Path(listener_module.__file__).parents[1]
    silent = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            listens = isinstance(node, ast.Call) and getattr(node.func, "id", "") in LISTENERS
            if listens and "expected" not in [keyword.arg for keyword in node.keywords]:
                silent.add(str(path.relative_to(source)))
    assert silent == SERVES_ANYBODY
