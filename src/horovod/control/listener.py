"""Accepts connections on listening sockets, and authenticates them. On Unix sockets, only processes of this user are accepted.

Runs in its owner's selector loop, and never blocks it. A connection with a wrong proof is closed at once, one that sends
nothing after ``HANDSHAKE_SECONDS``. At most ``LARGEST_QUEUE`` connections are in their handshake at a time; a new one
replaces the oldest.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from horovod.control.connection import Connection, is_same_user
from horovod.control.handshake import HandshakeError, ServerHandshake

LARGEST_QUEUE = 256
HANDSHAKE_SECONDS = 10.0

_log = logging.getLogger("horovod.control")

Welcome = Callable[[Connection, bytes], None]
"""Called with each authenticated, non-blocking connection, and its purpose."""


class ConnectionListener:
    """Accepts on ``listeners`` and authenticates with ``secret``, in callbacks of ``selector``.

    Every object registered with the selector has a callable as its data. The owner's loop calls ``key.data(events)``.

    Args:
        welcome: called with each authenticated connection.
        preface: sent on every new connection before the handshake. It must fit into a socket's buffer: a few KiB at most.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Iterable[socket.socket],
        secret: bytes,
        welcome: Welcome,
        preface: bytes = b"",
    ) -> None:
        self._selector = selector
        self._listeners = list(listeners)
        self._secret = secret
        self._welcome = welcome
        self._preface = preface
        self._pending: dict[socket.socket, tuple[ServerHandshake, float]] = {}
        for server_socket in self._listeners:
            server_socket.setblocking(False)
            selector.register(
                server_socket, selectors.EVENT_READ, lambda _, server_socket=server_socket: self._accept(server_socket)
            )

    def next_deadline(self) -> float | None:
        """When the oldest unfinished handshake expires (``time.monotonic``). The owner's loop must not sleep longer."""
        for _, deadline in self._pending.values():
            return deadline  # insertion order is age
        return None

    def expire(self) -> None:
        """Close the connections whose handshake took too long."""
        now = time.monotonic()
        for connection in [c for c, (_, deadline) in self._pending.items() if deadline <= now]:
            self._refuse(connection, "its handshake did not finish")

    def close(self) -> None:
        """Close all connections that are in their handshake. The listening sockets remain open; their owner closes them."""
        for connection in list(self._pending):
            self._refuse(connection, "")
        for server_socket in self._listeners:
            self._selector.unregister(server_socket)

    def _accept(self, server_socket: socket.socket) -> None:
        for _ in range(64):  # bounded, so that many connections cannot keep the owner from its other work
            try:
                connection, _address = server_socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors; the listening socket remains readable
                _log.warning("cannot accept a connection (%s); dropping the oldest unauthenticated one", error)
                if not self._drop_oldest():
                    time.sleep(0.05)  # nothing to drop: do not poll without pause
                return
            if connection.family == socket.AF_UNIX and not is_same_user(connection):
                connection.close()
                continue
            if len(self._pending) >= LARGEST_QUEUE:
                self._drop_oldest()
            connection.setblocking(False)
            handshake = ServerHandshake(self._secret)
            try:
                connection.send(self._preface + handshake.greeting)
            except OSError:
                connection.close()
                continue
            self._pending[connection] = (handshake, time.monotonic() + HANDSHAKE_SECONDS)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda _, connection=connection: self._read(connection)
            )

    def _read(self, connection: socket.socket) -> None:
        pending = self._pending.get(connection)
        if pending is None:
            return  # another event of the same poll has dropped it
        handshake, _ = pending
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

    def _drop_oldest(self) -> bool:
        for connection in self._pending:
            self._refuse(connection, "too many connections wait for their handshake")
            return True
        return False

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()
        if reason:
            _log.debug("refused a connection: %s", reason)
