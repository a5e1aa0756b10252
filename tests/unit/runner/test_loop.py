"""Waiting for descriptors and deadlines in one loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from horovod.runner.event_loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_deadlines_come_in_their_order_and_can_be_replaced_and_forgotten(loop: Loop) -> None:
    seen: list[str] = []
    loop.after("late", 0.02, lambda: seen.append("late"))
    loop.after("never", 0.01, lambda: seen.append("never"))
    loop.after("early", 5, lambda: seen.append("wrong"))
    loop.after("early", 0.0, lambda: seen.append("early"))
    loop.cancel("never")
    loop.run(lambda: len(seen) == 2)
    assert seen == ["early", "late"]


def test_a_descriptor_forgotten_by_an_earlier_callback_is_not_called(loop: Loop) -> None:
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []

    def act(own: int, other: int) -> None:
        called.append(own)
        loop.unwatch(other)

    try:
        for own, other in ((0, 1), (1, 0)):
            os.write(pipes[own][1], b"x")
            loop.watch(pipes[own][0], lambda own=own, other=other: act(own, pipes[other][0]))
        loop.run(lambda: bool(called))
        assert len(called) == 1
    finally:
        for pair in pipes:
            for descriptor in pair:
                os.close(descriptor)


def test_waiting_can_be_bounded(loop: Loop) -> None:
    loop.run(lambda: False, time.monotonic() + 0.01)
