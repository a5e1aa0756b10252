"""Agents that a cluster's own processes start, without ssh: each waits for one connection from the launcher.

The connection must begin with a token that the cluster has brought to both sides. It is then the agent's standard input and
output.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from horovod.control.dial import set_keepalive
from horovod.runner.agent.agent_program import LOST_AFTER_SECONDS
from horovod.runner.reach.remote import AgentConnection
from horovod.runner.reach.srun import AGENT

TOKEN_BYTES = 32
_TOKEN_SECONDS = 5.0
_ADMITTED = b"\1"


def admit(server: socket.socket, token: bytes, seconds: float) -> socket.socket | None:
    """Wait for one connection that begins with ``token``. Closes ``server``.

    Args:
        server: a socket that listens. If another thread shuts it down, the wait ends.
        token: of :data:`TOKEN_BYTES`.
        seconds: how long to wait.

    Returns:
        The connection; None if none came.
    """
    deadline = time.monotonic() + seconds
    with server, contextlib.suppress(OSError):
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            connection, _ = server.accept()
            try:
                connection.settimeout(_TOKEN_SECONDS)
                if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                    connection.sendall(_ADMITTED)
                    connection.settimeout(None)
                    return connection
            except OSError:
                pass  # a stranger
            connection.close()
    return None


def serve(
    server: socket.socket, token: bytes, seconds: float, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes] | None:
    """Start an agent on the first connection that begins with ``token``. See :func:`admit`.

    Args:
        environment: of the agent; None for that of this process.

    Returns:
        The agent, which ends with the connection; None if none came in time.
    """
    connection = admit(server, token, seconds)
    if connection is None:
        return None
    with connection:
        stream = connection.fileno()
        return subprocess.Popen([sys.executable, "-c", AGENT], stdin=stream, stdout=stream, env=environment)


def hold(server: socket.socket, token: bytes, seconds: float) -> None:
    """Wait until the other end closes the first connection that begins with ``token``, or is lost. See :func:`admit`."""
    connection = admit(server, token, seconds)
    if connection is not None:
        with connection, contextlib.suppress(OSError):
            set_keepalive(connection, LOST_AFTER_SECONDS)
            while connection.recv(1):
                pass


def connect(addresses: Sequence[tuple[str, int]], token: bytes, seconds: float) -> socket.socket:
    """A connection to an agent that waits at one of ``addresses``.

    Args:
        seconds: how long to try each of them.

    Raises:
        OSError: none has admitted it; the error is that of the last.
    """
    last = OSError("no address was given")
    for address in addresses:
        try:
            made = socket.create_connection(address, timeout=seconds)
        except OSError as error:
            last = error
            continue
        try:
            made.sendall(token)
            if made.recv(1) == _ADMITTED:
                made.settimeout(None)
                set_keepalive(made, LOST_AFTER_SECONDS)
                return made
            last = ConnectionError("another program listens there")
        except OSError as error:
            last = error
        made.close()
    raise last


class SocketConnection(AgentConnection):
    """A connection of :func:`connect`."""

    def __init__(self, connection: socket.socket) -> None:
        self.reader, self.writer = os.dup(connection.fileno()), connection.detach()
        self.errors, nothing = os.pipe()  # the agent's standard error is that of the process that has started it
        os.close(nothing)

    def explain(self, errors: str, preamble: str) -> str:
        return ""

    def close(self, *, orderly: bool) -> None:
        os.close(self.errors)
