"""Messages on a stream: four bytes of length, big-endian, then that many bytes. Only on authenticated connections."""

from __future__ import annotations

LENGTH_BYTES = 4
CONTROL_LIMIT = 64 << 20
"""The largest control message, in bytes: far above any real one, and small enough to be held in memory."""


class FrameError(Exception):
    """The peer has announced a message that is too long."""


def frame(body: bytes) -> bytes:
    """``body`` behind its length."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts the bytes that arrive into messages."""

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
