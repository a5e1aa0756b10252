"""A wake-up reaches the thread that polls, and nothing else."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from horovod.control.wakeup import WakeUp
from time_limits import SOON


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    made = WakeUp()
    yield made
    made.close()


def readable(wake_up: WakeUp) -> bool:
    poll = select.poll()
    poll.register(wake_up, select.POLLIN)
    return bool(poll.poll(0))


def test_it_is_readable_until_it_is_cleared(wake_up: WakeUp) -> None:
    assert not readable(wake_up)
    for _ in range(3):
        wake_up.set()
    assert readable(wake_up)
    wake_up.clear()
    assert not readable(wake_up)


def test_any_number_of_wake_ups_block_no_thread(wake_up: WakeUp) -> None:
    for _ in range(70_000):  # more than a pipe holds
        wake_up.set()
    assert readable(wake_up)


def test_a_file_that_got_its_number_after_it_was_closed_is_not_written_to() -> None:
    wake_up = WakeUp()
    wake_up.close()
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        wake_up.set()
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        wake_up.close()  # the second time closes nobody's file
        os.fstat(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_it_is_not_closed_in_the_middle_of_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_up, real = WakeUp(), os.write
    closing = threading.Thread(target=wake_up.close)

    def write(descriptor: int, data: bytes) -> int:
        closing.start()
        closing.join(0.05)
        return real(descriptor, data)  # fails if the descriptor is closed by now

    monkeypatch.setattr(os, "write", write)
    wake_up.set()
    closing.join(SOON)
    assert not closing.is_alive()


def test_two_threads_may_clear_it(wake_up: WakeUp) -> None:
    wake_up.set()
    wake_up.clear()
    wake_up.clear()
    assert not readable(wake_up)
