"""Passes changes of hosts from the launcher to the states of this process."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

from horovod.elastic import rounds
from horovod.elastic.updates import HostUpdateResult


class HostUpdateListener(Protocol):
    """A state."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts were added or removed. Called on any thread."""


class NotificationManager:
    """Notifies registered states of changes of hosts. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[HostUpdateListener] = []
        self._latest = -math.inf

    def init(self) -> None:
        """Called when ``hvd.elastic.run`` begins. There is nothing to set up: each check asks the connected launcher."""

    def register_listener(self, listener: HostUpdateListener) -> None:
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: HostUpdateListener) -> None:
        """Unregister a state. Does nothing if it is not registered."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all states. A launcher that pushes changes may call it instead of answering :meth:`poll`."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def poll(self) -> None:
        """Ask the launcher, and notify all states of changes."""
        result = rounds.poll()
        if result != HostUpdateResult.no_update:
            with self._lock:  # later than all earlier ones, even if the clock goes back
                self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
                timestamp = self._latest
            self.handle_hosts_updated(timestamp, result)


notification_manager = NotificationManager()
