"""Poll objects that tests put into liveness monitors, to count, to hold up or to kill them."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import patch

from horovod.control import liveness_monitor
from horovod.control.channel import Channel
from horovod.control.liveness_monitor import LivenessMonitor
from time_limits import SOON


class CountingPoll:
    """A poll object that counts how often it was asked."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._closing: Iterable[Channel] = ()
        self._closed = threading.Event()
        self.count = 0

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        self.count += 1
        found = self._poll.poll(milliseconds)
        for channel in self._closing:
            with suppress(OSError):  # its peer has gone
                channel.socket.shutdown(socket.SHUT_RDWR)
        if self._closing:
            self._closed.set()
        return found

    def kill(self, monitor: LivenessMonitor, channels: Mapping[int, Channel]) -> None:
        """End the monitor as the kernel ends a killed process: its connections close while it polls, without a word."""
        self._closing = [channel for channel in channels.values() if channel.fileno() >= 0]
        monitor.probe()
        assert not self._closing or self._closed.wait(SOON)
        self._closing = ()
        monitor.leave()

    def __getattr__(self, name: str) -> object:
        return getattr(self._poll, name)


class HeldUpPoll(CountingPoll):
    """A poll object that finds nothing while its rank is stopped."""

    def __init__(self, runs: threading.Event) -> None:
        super().__init__()
        self._runs = runs

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        found = super().poll(milliseconds)
        self._runs.wait(SOON)
        return found


@contextmanager
def polling_with(poll: CountingPoll) -> Iterator[None]:
    """A liveness monitor that is made in the block waits with ``poll``."""
    names = {**vars(select), "poll": lambda: poll}
    with patch.object(liveness_monitor, "select", SimpleNamespace(**names)):
        yield
