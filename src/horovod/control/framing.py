"""Messages on a stream: four bytes of length, big-endian, then that many bytes. Only on authenticated connections."""

from __future__ import annotations

LENGTH_BYTES = 4
CONTROL_LIMIT = 64 << 20
"""Longest control message: far above any real one, far below what would hurt."""


class FrameError(Exception):
    """The other side announced a message longer than it may be."""


def frame(body: bytes) -> bytes:
    """``body`` with its length in front."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts arriving bytes into messages."""

    def __init__(self, limit: int = CONTROL_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take arrived bytes, return the messages that are complete by now.

        Raises:
            FrameError: an announced length is above the limit; the connection must be closed.
        """
        buffer = self._buffer
        if not buffer and len(data) == LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big") <= self._limit:
            return [data[LENGTH_BYTES:]]  # mostly just that
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
