"""Messages between a launcher and an agent: whole, in order, bounded, and the end of one side seen by the other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from connections import frame
from horovod.runner.agent.messages import GREETING, AgentEvent, OutputData, decode_event, encode
from horovod.runner.agent.stream import MessageStream
from horovod.runner.event_loop import Loop


class Pair:
    """A stream under test and the raw descriptors of its other side."""

    def __init__(self, greeting: bytes = b"") -> None:
        self.loop = Loop()
        reader, self.to = os.pipe()
        self.out, writer = os.pipe()
        self.heard: list[AgentEvent] = []
        self.ended: list[str] = []
        self.congestion: list[bool] = []
        self.stream = MessageStream(
            self.loop,
            reader,
            writer,
            decode_event,
            self.heard.append,
            self.ended.append,
            self.congestion.append,
            greeting,
        )

    def run(self) -> None:
        self.loop.run(lambda: bool(self.ended), time.monotonic() + 0.05)

    def close(self) -> None:
        self.stream.close()
        self.loop.close()
        for descriptor in (self.to, self.out):
            try:
                os.close(descriptor)
            except OSError:
                pass


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(GREETING)
    yield made
    made.close()


MESSAGE = OutputData(3, "stdout", b"hello")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_messages_arrive_whole_behind_whatever_a_login_shell_says(pair: Pair, step: int) -> None:
    data = b"Welcome\nto \0 this host\n" + GREETING + frame(encode(MESSAGE)) * 2
    for start in range(0, len(data), step):
        os.write(pair.to, data[start : start + step])
        pair.loop.run(lambda: False, time.monotonic() + 0.002)
    assert pair.heard == [MESSAGE, MESSAGE] and not pair.ended
    assert pair.stream.preamble.startswith(b"Welcome")


@pytest.mark.parametrize("rubbish", [b"\xff" * 100, frame(b"\xc1"), frame(b""), frame(encode("text"))])
def test_rubbish_ends_the_conversation(pair: Pair, rubbish: bytes) -> None:
    os.write(pair.to, GREETING + rubbish)
    pair.run()
    assert len(pair.ended) == 1 and pair.heard == []


def test_endless_chatter_is_not_kept(pair: Pair) -> None:
    for _ in range(100):
        os.write(pair.to, b"x" * 60_000)
        pair.loop.run(lambda: False, time.monotonic() + 0.002)
    assert len(pair.stream.preamble) < 1 << 17


def test_the_end_of_the_other_side_is_told_once(pair: Pair) -> None:
    os.close(pair.to)
    pair.run()
    pair.stream.send(b"nobody takes this")
    pair.run()
    assert len(pair.ended) == 1


def test_a_congested_sender_is_paused_and_resumed() -> None:
    pair = Pair()
    try:
        body = bytes(1 << 16)
        sent = 0
        while not pair.congestion:
            pair.stream.send(body)
            sent += 1
        assert sent < 100 and pair.congestion == [True]
        taken = 0
        while taken < sent * (len(body) + 4):
            taken += len(os.read(pair.out, 1 << 20))
            pair.loop.run(lambda: pair.stream.idle, time.monotonic() + 0.01)
        assert pair.congestion == [True, False] and pair.stream.idle
    finally:
        pair.close()
