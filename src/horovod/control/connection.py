"""An authenticated connection, and the messages on it: all control connections of a job are one of these.

:func:`horovod.control.dial.dial` and :class:`horovod.control.listener.ConnectionListener` make them. A thread that may wait
sends and receives here; one that must not makes a :class:`~horovod.control.channel.Channel` of the connection, also after it
has sent and received here. An engine for data takes only the socket, and its bytes are not protected.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from horovod.control.handshake import Keys
from horovod.control.sealing import LENGTH_BYTES, Message, Opener, Sealer

NO_KEYS = Keys()


class Connection:
    """A connected stream socket and the state of its protection.

    Args:
        connected: the socket, which the connection owns.
        keys: of this end. On a Unix socket they are not used: only processes of this host reach it, and both ends have checked
            that the other one runs as the same user.
    """

    __slots__ = ("opener", "sealer", "socket")

    def __init__(self, connected: socket.socket, keys: Keys = NO_KEYS) -> None:
        local = connected.family == socket.AF_UNIX
        self.socket = connected
        self.sealer = Sealer() if local else Sealer(keys.sending)
        self.opener = Opener() if local else Opener(keys.receiving)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, body: bytes, deadline: float, descriptor: int = -1) -> None:
        """Send a message, and with it a descriptor if the connection is a Unix socket.

        Raises:
            OSError: the connection has ended, or the peer has not taken the message by ``deadline`` (``time.monotonic``).
        """
        pieces = self.sealer.seal(Message(body))
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        if descriptor >= 0 and self.socket.family == socket.AF_UNIX:
            sent = socket.send_fds(self.socket, [pieces[0]], [descriptor])
            pieces[0] = pieces[0][sent:]
        for piece in pieces:
            self.socket.sendall(piece)

    def receive(self, limit: int, deadline: float, rest_seconds: float = 0.0) -> tuple[bytes, int]:
        """Wait for a message. Returns it with the descriptor that came with it, or -1.

        Args:
            limit: the maximum size of the message, in bytes.
            deadline: ``time.monotonic`` by which it must begin to arrive.
            rest_seconds: how much later the rest may arrive.

        Raises:
            SealError: the message is not what was sent.
            OSError: the connection has ended, the message is too long, or has not come by ``deadline``.
        """
        descriptors: list[int] = []
        head = b""
        try:
            if self.socket.family == socket.AF_UNIX:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                head, descriptors, _, _ = socket.recv_fds(self.socket, LENGTH_BYTES, 1)
                if not head:
                    raise ConnectionResetError("the connection was closed")
            opener = self.opener
            length = opener.length(head + receive_exactly(self.socket, opener.head_bytes - len(head), deadline))
            if length > limit:
                raise ConnectionError(f"it announced a message of {length} bytes")
            body = receive_exactly(self.socket, length, deadline + rest_seconds)
            opener.check(body, receive_exactly(self.socket, opener.tail_bytes, deadline + rest_seconds))
        except OSError:
            for received in descriptors:
                os.close(received)
            raise
        return body, descriptors[0] if descriptors else -1


def receive_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Read ``length`` bytes. Raises OSError if the connection ends, or at ``deadline`` (``time.monotonic``)."""
    data = bytearray()
    while len(data) < length:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(remaining)
        chunk = connection.recv(min(length - len(data), 1 << 20))
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        data += chunk
    return bytes(data)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer on a Unix socket runs as this process's user (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
