"""Accepts connections on listening sockets, and authenticates them. On Unix sockets, only processes of this user are accepted.

Runs in its owner's selector loop, and never blocks it. A connection with a wrong proof is closed at once, one that sends
nothing after ``HANDSHAKE_SECONDS``. At most ``LARGEST_QUEUE`` connections are in their handshake at a time. When there are so
many, no more are accepted until one is done, and each has ``CROWDED_SECONDS``: the others wait in the kernel's backlog.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from horovod.control.connection import Connection, is_same_user
from horovod.control.handshake import HandshakeError, ServerHandshake

LARGEST_QUEUE = 256
FEWEST_FROM_ONE = 32
"""So many connections from one address may be in their handshake in any job."""
HANDSHAKE_SECONDS = 10.0
CROWDED_SECONDS = 1.0
"""How long a handshake may take while others wait for a place in the queue. Ranks that need longer try again."""

_log = logging.getLogger("horovod.control")

Welcome = Callable[[Connection, bytes], None]
"""Called with each authenticated, non-blocking connection, and its purpose."""


class _Unfinished(NamedTuple):
    """A connection in its handshake, and when that began (``time.monotonic``)."""

    handshake: ServerHandshake
    began: float
    source: str


class ConnectionListener:
    """Accepts on ``listeners`` and authenticates with ``secret``, in callbacks of ``selector``.

    Every object registered with the selector has a callable as its data. The owner's loop calls ``key.data(events)``.

    Args:
        welcome: called with each authenticated connection.
        expected: the most connections that may come from one address at a time. If more are in their handshake, the oldest
            of that address is dropped: so a stranger does not keep clients at other addresses waiting.
        preface: sent on every new connection before the handshake. It must fit into a socket's buffer: a few KiB at most.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Iterable[socket.socket],
        secret: bytes,
        welcome: Welcome,
        preface: bytes = b"",
        expected: int = LARGEST_QUEUE,
    ) -> None:
        self._selector = selector
        self._listeners = list(listeners)
        self._secret = secret
        self._welcome = welcome
        self._preface = preface
        self._most_from_one = max(expected, FEWEST_FROM_ONE)
        self._pending: dict[socket.socket, _Unfinished] = {}
        self._accepting = False
        for server_socket in self._listeners:
            server_socket.setblocking(False)
        self._resume()

    def next_deadline(self) -> float | None:
        """When the oldest unfinished handshake expires (``time.monotonic``). The owner's loop must not sleep longer."""
        for pending in self._pending.values():
            return self._deadline(pending)  # insertion order is age
        return None

    def _deadline(self, pending: _Unfinished) -> float:
        return pending.began + (HANDSHAKE_SECONDS if self._accepting else min(HANDSHAKE_SECONDS, CROWDED_SECONDS))

    def expire(self) -> None:
        """Close the connections whose handshake took too long."""
        now = time.monotonic()
        for connection in [each for each, pending in self._pending.items() if self._deadline(pending) <= now]:
            self._refuse(connection, "its handshake did not finish")
        if len(self._pending) < LARGEST_QUEUE:
            self._resume()

    def close(self) -> None:
        """Close all connections that are in their handshake. The listening sockets remain open; their owner closes them."""
        for connection in list(self._pending):
            self._refuse(connection, "")
        self._pause()

    def _resume(self) -> None:
        if not self._accepting:
            self._accepting = True
            for server_socket in self._listeners:
                self._selector.register(
                    server_socket,
                    selectors.EVENT_READ,
                    lambda _, server_socket=server_socket: self._accept(server_socket),
                )

    def _pause(self) -> None:
        """Leave connections that come in the kernel's backlog."""
        if self._accepting:
            self._accepting = False
            for server_socket in self._listeners:
                self._selector.unregister(server_socket)

    def _accept(self, server_socket: socket.socket) -> None:
        for _ in range(64):  # bounded, so that many connections cannot keep the owner from its other work
            if len(self._pending) >= LARGEST_QUEUE:
                self._pause()
            if not self._accepting:
                return
            try:
                connection, address = server_socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors; the listening socket remains readable
                _log.warning("cannot accept a connection: %s", error)
                if self._pending:
                    self._refuse(next(iter(self._pending)), "there is no room for another one")
                else:
                    time.sleep(0.05)  # do not poll without pause
                return
            if connection.family == socket.AF_UNIX and not is_same_user(connection):
                connection.close()
                continue
            source = address[0] if isinstance(address, tuple) else ""
            self._limit(source)
            connection.setblocking(False)
            handshake = ServerHandshake(self._secret)
            try:
                connection.send(self._preface + handshake.greeting)
            except OSError:
                connection.close()
                continue
            self._pending[connection] = _Unfinished(handshake, time.monotonic(), source)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda _, connection=connection: self._read(connection)
            )

    def _read(self, connection: socket.socket) -> None:
        pending = self._pending.get(connection)
        if pending is None:
            return  # another event of the same poll has dropped it
        handshake = pending.handshake
        try:
            data = connection.recv(4096)
            if not data:
                self._refuse(connection, "it closed during the handshake")
                return
            reply = handshake.receive(data)
            if reply is None:
                return
            connection.send(reply)
        except (BlockingIOError, InterruptedError):
            return
        except (HandshakeError, OSError) as error:
            self._refuse(connection, str(error))
            return
        del self._pending[connection]
        self._selector.unregister(connection)
        self._welcome(Connection(connection, handshake.keys), handshake.purpose)

    def _limit(self, source: str) -> None:
        """Make room for a connection from an address from which too many are in their handshake."""
        theirs = [each for each, pending in self._pending.items() if pending.source == source]
        if len(theirs) >= self._most_from_one:
            self._refuse(theirs[0], "too many connections of its address wait for their handshake")

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()
        if reason:
            _log.debug("refused a connection: %s", reason)
