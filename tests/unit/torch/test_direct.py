"""Device memory is submitted without letting go of the interpreter lock."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from horovod.torch.device.direct import TorchDeviceMemory
from horovod.torch.device.runtime import TorchRuntime
from time_limits import SOON

TENSORS = 5000


class _Runtime(TorchRuntime):
    """Host memory in place of a device's."""

    def capturing(self) -> bool:
        return False

    def current_stream(self) -> Any:
        return SimpleNamespace()

    def record(self, stream: Any) -> Any:
        return SimpleNamespace()


class _Computing(threading.Thread):
    """Takes the interpreter lock as often as it can.

    Attributes:
        turns: how often it had the lock.
        watched: whether the thread is to end at its next turn.
        had_a_turn: whether it has had a turn since.
    """

    turns = 0
    watched = False
    had_a_turn = False

    def run(self) -> None:
        while not self.watched:
            self.turns += 1
            time.sleep(0)  # lets go of the lock, and waits for it
        self.had_a_turn = True

    def await_turns(self, number: int) -> None:
        """Let go of the lock until the thread has had so many more turns."""
        last, deadline = self.turns + number, time.monotonic() + SOON
        while self.turns < last:
            assert time.monotonic() < deadline, "the thread had no turn"
            time.sleep(0.001)  # without Python's lock, so that the thread has its turns


def test_a_group_of_tensors_is_taken_without_letting_another_thread_compute() -> None:
    tensors = [torch.ones(2) for _ in range(TENSORS)]
    memory = TorchDeviceMemory(_Runtime(torch.device("cpu")), "nccl", None)
    computing, interval = _Computing(), sys.getswitchinterval()
    computing.start()
    try:
        sys.setswitchinterval(1000)  # from here on it gets the lock only if this thread lets go of it
        computing.await_turns(2)  # the wait of the second began with this interval, and so did all that follow
        computing.watched = True
        views = memory.read(tensors)
        had_a_turn = computing.had_a_turn
    finally:
        sys.setswitchinterval(interval)
        computing.watched = True
        computing.join()
    assert len(views) == TENSORS
    assert not had_a_turn, "another thread, which would keep the lock for milliseconds, got it"
