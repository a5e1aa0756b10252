"""The two ends of connections, as after a handshake, and messages as bytes where they need no protection."""

from __future__ import annotations

import secrets
import socket

from horovod.control.connection import Connection
from horovod.control.handshake import Keys
from horovod.control.sealing import Message, Sealer


def frame(body: bytes) -> bytes:
    return b"".join(Sealer().seal(Message(body)))


def ends(pair: tuple[socket.socket, socket.socket]) -> tuple[Connection, Connection]:
    """Both ends of a connection over two connected sockets."""
    there, back = secrets.token_bytes(32), secrets.token_bytes(32)
    near, far = pair
    return Connection(near, Keys(there, back)), Connection(far, Keys(back, there))
