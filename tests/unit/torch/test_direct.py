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
        watched: whether the thread is to end at its next turn.
        had_a_turn: whether it has had a turn since.
    """

    watched = False
    had_a_turn = False

    def run(self) -> None:
        while not self.watched:
            time.sleep(0)  # lets go of the lock, and waits for it
        self.had_a_turn = True


def test_a_group_of_tensors_is_taken_without_letting_another_thread_compute() -> None:
    tensors = [torch.ones(2) for _ in range(TENSORS)]
    memory = TorchDeviceMemory(_Runtime(torch.device("cpu")), "nccl", None)
    computing, interval = _Computing(), sys.getswitchinterval()
    computing.start()
    try:
        sys.setswitchinterval(1000)  # from here on it gets the lock only if this thread lets go of it
        time.sleep(0.05)  # it now waits for the lock by this interval
        computing.watched = True
        views = memory.read(tensors)
        had_a_turn = computing.had_a_turn
    finally:
        sys.setswitchinterval(interval)
        computing.watched = True
        computing.join()
    assert len(views) == TENSORS
    assert not had_a_turn, "another thread, which would keep the lock for milliseconds, got it"
