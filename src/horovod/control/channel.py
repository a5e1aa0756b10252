"""Messages over an authenticated connection, without ever blocking its owner's thread.

:mod:`horovod.control.sealing` describes the bytes of a message.
"""

from __future__ import annotations

import socket
from collections import deque

from horovod._base.silent_host import ends_of, is_silence, silent_host_reason
from horovod.control.connection import Connection
from horovod.control.sealing import LENGTH_BYTES, Message, Opener, SealError

_CHUNK = 1 << 18

CONTROL_LIMIT = 64 << 20
"""The maximum size of a control message, in bytes: far above that of any real message, and small enough for memory."""


class FrameError(Exception):
    """The peer has announced a message that is too long."""


class FrameReader:
    """Splits the bytes that arrive into messages.

    Args:
        limit: the maximum size of a message, in bytes.
        opener: checks the messages; None: they have no digests.
    """

    def __init__(self, limit: int = CONTROL_LIMIT, opener: Opener | None = None) -> None:
        self._limit = limit
        self._opener = opener or Opener()
        self._buffer = bytearray()
        self._length = -1  # of the next message, once its head has been checked

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes that have arrived. Returns the messages that are complete.

        Raises:
            FrameError: an announced length is above the limit; the connection must be closed.
            SealError: a message is not what was sent; the connection must be closed.
        """
        buffer, opener = self._buffer, self._opener
        head, tail = opener.head_bytes, opener.tail_bytes
        if not buffer and self._length < 0:
            length = int.from_bytes(data[:LENGTH_BYTES], "big")
            if len(data) == head + length + tail and length <= self._limit:  # the usual case: one whole message
                opener.length(data[:head])
                body = data[head : head + length]
                opener.check(body, data[head + length :])
                return [body]
        buffer += data
        messages: list[bytes] = []
        position = 0
        while True:
            if self._length < 0:
                if len(buffer) - position < head:
                    break
                self._length = opener.length(buffer[position : position + head])
                if self._length > self._limit:
                    raise FrameError(
                        f"a message of {self._length} bytes was announced; at most {self._limit} are allowed"
                    )
                position += head
            end = position + self._length
            if len(buffer) < end + tail:
                break
            body = bytes(buffer[position:end])
            opener.check(body, buffer[end : end + tail])
            messages.append(body)
            position, self._length = end + tail, -1
        if position:
            del buffer[:position]
        return messages


class ChannelClosed(Exception):
    """The peer has closed the connection, or broke the protocol, or what lies between the two ends is at fault.

    Attributes:
        network: why the peer is lost if the network is at fault: its host is silent, or messages were changed on their way;
            else "".
        changed: whether messages were changed on their way. Then both ranks may be well.
    """

    def __init__(self, why: str, network: str = "", changed: bool = False) -> None:
        super().__init__(why)
        self.network = network
        self.changed = changed


class Channel:
    """Messages over a connection. One thread owns the channel, and polls it.

    Bytes that the kernel does not take at once wait in an outbox. While :attr:`wants_write` is true, the owner polls for
    writability as well, and calls :meth:`flush`.

    Args:
        connection: the channel makes it non-blocking, and closes it.
        limit: the maximum size of a received message, in bytes.
        reach_seconds: how long sent data may stay unacknowledged before the kernel breaks the connection; 0: the kernel's
            default, about 15 minutes. The host of a stopped process still acknowledges data.
    """

    def __init__(self, connection: Connection, limit: int = CONTROL_LIMIT, reach_seconds: float = 0) -> None:
        self.socket = connected = connection.socket
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if reach_seconds:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(reach_seconds * 1000))
        self._ends = ends_of(connected)
        self._silence = ""
        self._sealer = connection.sealer
        self._reader = FrameReader(limit, connection.opener)
        self._outbox: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def send(self, body: bytes | Message) -> None:
        """Send one message, or queue what does not fit in the socket's buffer. Channels share the bytes of a
        :class:`~horovod.control.sealing.Message`."""
        for data in self._sealer.seal(body if isinstance(body, Message) else Message(body)):
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
            ChannelClosed: the connection has ended, the announced length is too large, or a message is not what was sent.
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
        except SealError as error:
            where = f"its connection {self._ends}" if self._ends else "its connection"
            raise ChannelClosed(str(error), f"{where} is not safe: {error}", changed=True) from error

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
