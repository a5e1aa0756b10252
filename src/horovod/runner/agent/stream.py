"""Typed messages over a pair of descriptors, such as a pipe to and a pipe from another program, without ever blocking."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from horovod.control.channel import FrameError, FrameReader
from horovod.control.sealing import Message, Sealer
from horovod.runner.event_loop import Loop

_CHUNK = 1 << 18
_CONGESTED_BYTES = 1 << 20
_PREAMBLE_BYTES = 1 << 14
T = TypeVar("T")


class MessageStream(Generic[T]):
    """One end of a message stream. It owns the descriptors, which must differ, and makes them non-blocking.

    Args:
        loop: calls this object when something arrives.
        reader, writer: the descriptors.
        decode: turns a message's bytes into the message.
        on_message: called with each message.
        on_end: called once, with the reason, when no message can come any more; not after :meth:`close`.
        on_congestion: called with True when the sender should pause because much is queued, and with False when it is sent.
        greeting: what the other side writes before its first message. Data before the greeting is kept in ``preamble``.
    """

    def __init__(
        self,
        loop: Loop,
        reader: int,
        writer: int,
        decode: Callable[[bytes], T],
        on_message: Callable[[T], object],
        on_end: Callable[[str], object],
        on_congestion: Callable[[bool], object] = lambda _: None,
        greeting: bytes = b"",
    ) -> None:
        self._loop = loop
        self._reader = reader
        self._writer = writer
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._on_congestion = on_congestion
        self._greeting = greeting
        self._sealer, self._frames = Sealer(), FrameReader()
        self._outbox: deque[memoryview] = deque()
        self._waiting = 0  # bytes in the outbox
        self._congested = False
        self._ended = False
        self._closed = False
        self.preamble = b""
        """The end of the data that came before the greeting."""
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        loop.watch(reader, self._read)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outbox

    def send(self, message: bytes) -> None:
        """Send an encoded message, or keep what does not fit into the pipe. Does nothing once the other side is gone."""
        for piece in self._sealer.seal(Message(message)):
            self.write(piece)

    def write(self, data: bytes) -> None:
        """Send bytes as they are, such as a greeting."""
        if self._ended or self._closed:
            return
        first = not self._outbox
        self._outbox.append(memoryview(data))
        self._waiting += len(data)
        if first:
            self._flush()
            if self._outbox:
                self._loop.watch(self._writer, self._continue, for_writing=True)
        if self._waiting > _CONGESTED_BYTES and not self._congested:
            self._congested = True
            self._on_congestion(True)

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_writing()
        if self._loop.watches(self._reader):
            self._loop.unwatch(self._reader)
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> None:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
            return
        if not data:
            self._end("the other side has closed the connection")
            return
        if self._greeting:
            self.preamble, found, data = (self.preamble + data).partition(self._greeting)
            if not found:
                self.preamble = self.preamble[-_PREAMBLE_BYTES:]
                return
            self._greeting = b""
        try:
            for body in self._frames.feed(data):
                if self._closed:
                    return
                self._on_message(self._decode(body))
        except (FrameError, msgspec.DecodeError) as error:
            self._end(f"the data is not a message of an agent ({error}): is the same Horovod installed on both hosts?")

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = os.write(self._writer, self._outbox[0])
                self._waiting -= sent
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                    return
                self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError as error:  # messages that the other side sent before it ended must still be read
            self._outbox.clear()
            self._waiting = 0
            if not self._loop.watches(self._reader):
                self._end(str(error))

    def _continue(self) -> None:
        self._flush()
        if not self._outbox:
            self._loop.unwatch(self._writer)
            if self._congested:
                self._congested = False
                self._on_congestion(False)

    def _stop_writing(self) -> None:
        if self._loop.watches(self._writer):
            self._loop.unwatch(self._writer)
        self._outbox.clear()
        self._waiting = 0

    def _end(self, reason: str) -> None:
        if self._ended or self._closed:
            return
        self._ended = True
        self._stop_writing()
        self._loop.unwatch(self._reader)
        self._on_end(reason)
