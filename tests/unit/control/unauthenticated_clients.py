"""What a port scanner, a stray client or an attacker may send to an open port; each leaves its connections to be closed."""

from __future__ import annotations

import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from horovod.control.dial import Address
from horovod.control.handshake import GREETING, ClientHandshake
from time_limits import SOON


def connect(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.settimeout(SOON)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def say(connection: socket.socket, words: bytes) -> None:
    """Send what the far side will take: it may well close the door while a stranger is still speaking."""
    try:
        connection.sendall(words)
    except (BrokenPipeError, ConnectionResetError):
        pass


def no_bytes(address: Address) -> list[socket.socket]:
    return [connect(address) for _ in range(5)]


def random_bytes(address: Address) -> list[socket.socket]:
    source = random.Random(1)
    connections = []
    for length in (1, 33, 34, 66, 500, 10_000):
        connection = connect(address)
        say(connection, source.randbytes(length))
        connections.append(connection)
    return connections


def huge_length(address: Address) -> list[socket.socket]:
    connection = connect(address)
    say(connection, bytes(32) + b"\xff\xff" + b"\xff" * 60_000)
    return [connection]


def wrong_secret(address: Address) -> list[socket.socket]:
    connection = connect(address)
    say(connection, ClientHandshake(b"guess", b"rendezvous").answer(receive(connection, GREETING)))
    return [connection]


def closed_at_once(address: Address) -> list[socket.socket]:
    for _ in range(20):
        connect(address).close()
    return []


def reset(address: Address) -> list[socket.socket]:
    connection = connect(address)
    say(connection, b"x")
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    return []


def a_thousand_half_open(address: Address) -> list[socket.socket]:
    """A third of them say a little."""
    connections = [connect(address) for _ in range(1000)]
    for connection in connections[::3]:
        say(connection, b"almost")
    return connections


BAD_CLIENTS: dict[str, Callable[[Address], list[socket.socket]]] = {
    stranger.__name__: stranger
    for stranger in (
        no_bytes,
        random_bytes,
        huge_length,
        wrong_secret,
        closed_at_once,
        reset,
        a_thousand_half_open,
    )
}


def receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = connection.recv(length - len(data))
        assert chunk, "closed"
        data += chunk
    return data


@contextmanager
def visited_by(name: str, address: Address) -> Iterator[list[socket.socket]]:
    """A stranger has called at ``address`` and holds the line for the length of the block."""
    with enough_descriptors():
        connections = BAD_CLIENTS[name](address)
        try:
            yield connections
        finally:
            for connection in connections:
                connection.close()


@contextmanager
def enough_descriptors(number: int = 4096) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Recorder:
    """A relay between a client and a server that keeps what the client said first."""

    def __init__(self, server: Address) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(SOON)
        self.address: Address = self._listener.getsockname()
        self.said = bytearray()
        self._thread = threading.Thread(target=self._relay, name="test-recorder", daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        client, _ = self._listener.accept()
        client.settimeout(SOON)
        with client, connect(self._server) as server:
            back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
            back.start()
            self._copy(client, server, self.said)
            back.join(SOON)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        try:
            while data := source.recv(65536):
                if record is not None:
                    record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        self._thread.join(SOON)
        assert not self._thread.is_alive()
