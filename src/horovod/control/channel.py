"""An authenticated connection that carries messages without ever blocking its owner's thread.

On a stream a message is four bytes of its length, big-endian, then that many bytes.
"""

from __future__ import annotations

import socket
from collections import deque

from horovod._silence import ends_of, is_silence, silent_host_reason

_CHUNK = 1 << 18

LENGTH_BYTES = 4
CONTROL_LIMIT = 64 << 20
"""The maximum size of a control message, in bytes: far above that of any real message, and small enough for memory."""


class FrameError(Exception):
    """The peer has announced a message that is too long."""


def frame(body: bytes) -> bytes:
    """``body`` with its length before it."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Splits the bytes that arrive into messages.

    Args:
        limit: the maximum size of a message, in bytes.
    """

    def __init__(self, limit: int = CONTROL_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes that have arrived. Returns the messages that are complete.

        Raises:
            FrameError: an announced length is above the limit; the connection must be closed.
        """
        buffer = self._buffer
        if not buffer and len(data) == LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big") <= self._limit:
            return [data[LENGTH_BYTES:]]  # the usual case: one whole message
        buffer += data
        messages: list[bytes] = []
        position = 0
        while len(buffer) - position >= LENGTH_BYTES:
            start = position + LENGTH_BYTES
            length = int.from_bytes(buffer[position:start], "big")
            if length > self._limit:
                raise FrameError(f"a message of {length} bytes was announced; at most {self._limit} are allowed")
            if len(buffer) - start < length:
                break
            messages.append(bytes(buffer[start : start + length]))
            position = start + length
        if position:
            del buffer[:position]
        return messages


class ChannelClosed(Exception):
    """The peer has closed the connection, or broke the protocol, or its host is silent.

    Attributes:
        silence: why the peer is lost if its host is silent, else "".
    """

    def __init__(self, why: str, silence: str = "") -> None:
        super().__init__(why)
        self.silence = silence


class Channel:
    """Framed messages over a connected stream socket. One thread owns the channel, and polls it.

    Bytes that the kernel does not take at once wait in an outbox. While :attr:`wants_write` is true, the owner polls for
    writability as well, and calls :meth:`flush`.

    Args:
        connection: the connected socket; the channel makes it non-blocking, and closes it.
        limit: the maximum size of a received message, in bytes.
        reach_seconds: how long sent data may stay unacknowledged before the kernel breaks the connection; 0: the kernel's
            default, about 15 minutes. The host of a stopped process still acknowledges data.
    """

    def __init__(self, connection: socket.socket, limit: int = CONTROL_LIMIT, reach_seconds: float = 0) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if reach_seconds:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(reach_seconds * 1000))
        self.socket = connection
        self._ends = ends_of(connection)
        self._silence = ""
        self._reader = FrameReader(limit)
        self._outbox: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def send(self, body: bytes) -> None:
        """Send one message, or queue what does not fit in the socket's buffer."""
        self.send_framed(frame(body))

    def send_framed(self, data: bytes) -> None:
        """Send a message made by :func:`frame`. Several channels can queue the same bytes without a copy."""
        sent = 0 if self._outbox else self._write(data)
        if sent < len(data):
            self._outbox.append(memoryview(data)[sent:])

    def flush(self) -> None:
        """Send as much of what is queued as the socket takes."""
        while self._outbox:
            data = self._outbox[0]
            sent = self._write(data)
            if sent < len(data):
                self._outbox[0] = data[sent:]
                return
            self._outbox.popleft()

    def discard(self) -> None:
        """Drop what is queued, because the peer will not read it."""
        self._outbox.clear()

    def receive(self) -> list[bytes]:
        """The complete messages that have arrived, perhaps none.

        Raises:
            ChannelClosed: the connection has ended, or the announced length is too large.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise self._closed(error) from error
        if not data:
            raise ChannelClosed("connection closed", self._silence)
        try:
            return self._reader.feed(data)
        except FrameError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        self.socket.close()

    def _closed(self, error: OSError) -> ChannelClosed:
        """The exception for a socket error. Keeps why the host is silent: the kernel reports such an error only once, and the
        owner's next :meth:`receive` must still name it."""
        if self._ends and is_silence(error):
            self._silence = silent_host_reason(self._ends)
        return ChannelClosed(str(error), self._silence)

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._closed(error) from error
