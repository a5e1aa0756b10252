"""Connections to agents that wait for the launcher: the token admits it, and nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from horovod.runner.reach import awaiting_agent
from time_limits import SOON

TOKEN = b"t" * awaiting_agent.TOKEN_BYTES


class Waiting:
    """A thread that waits for one connection."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.admitted: socket.socket | None = None
        self.thread = threading.Thread(target=self._admit)
        self.thread.start()

    def _admit(self) -> None:
        self.admitted = awaiting_agent.admit(self.server, TOKEN, SOON)

    def end(self) -> None:
        self.thread.join(SOON)
        assert not self.thread.is_alive()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    if made.admitted is not None:
        made.admitted.close()


def test_a_connection_with_the_token_is_admitted_and_carries_bytes(waiting: Waiting) -> None:
    with awaiting_agent.connect([("127.0.0.1", waiting.port)], TOKEN, SOON) as connection:
        waiting.end()
        assert waiting.admitted is not None
        waiting.admitted.sendall(b"hello")
        assert connection.recv(5, socket.MSG_WAITALL) == b"hello"


def test_strangers_are_refused_and_do_not_end_the_wait(waiting: Waiting) -> None:
    with pytest.raises(OSError):
        awaiting_agent.connect([("127.0.0.1", waiting.port)], b"s" * len(TOKEN), SOON)
    socket.create_connection(("127.0.0.1", waiting.port)).close()
    with awaiting_agent.connect([("127.0.0.1", waiting.port)], TOKEN, SOON):
        waiting.end()
        assert waiting.admitted is not None


def test_addresses_are_tried_in_turn(waiting: Waiting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()
    with awaiting_agent.connect([closed, ("127.0.0.1", waiting.port)], TOKEN, SOON):
        waiting.end()


def test_another_thread_ends_the_wait(waiting: Waiting) -> None:
    waiting.server.shutdown(socket.SHUT_RDWR)
    waiting.end()
    assert waiting.admitted is None


def test_a_held_connection_lasts_until_the_other_end_closes_it() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    thread = threading.Thread(target=awaiting_agent.hold, args=(server, TOKEN, SOON))
    thread.start()
    with awaiting_agent.connect([address], TOKEN, SOON):
        assert thread.is_alive()
    thread.join(SOON)
    assert not thread.is_alive()
