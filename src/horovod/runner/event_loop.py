"""One thread that waits for descriptors and deadlines together, and never polls."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Hashable

Act = Callable[[], object]


class Loop:
    """Calls functions when descriptors are ready or deadlines have passed, inside :meth:`run`, on the calling thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: dict[Hashable, tuple[float, Act]] = {}

    def watch(self, descriptor: int, act: Act, *, for_writing: bool = False) -> None:
        """Call ``act`` whenever ``descriptor`` is readable; with ``for_writing``, writable. Only one of the two at a time.

        Raises:
            PermissionError: the descriptor is of an ordinary file, which is always ready.
        """
        self._selector.register(descriptor, selectors.EVENT_WRITE if for_writing else selectors.EVENT_READ, act)

    def unwatch(self, descriptor: int) -> None:
        """Forget a descriptor. Call this before closing it."""
        self._selector.unregister(descriptor)

    def watches(self, descriptor: int) -> bool:
        return descriptor in self._selector.get_map()

    def after(self, key: Hashable, seconds: float, act: Act) -> None:
        """Call ``act`` once, ``seconds`` from now. A second call with the same ``key`` replaces the first."""
        self._timers[key] = (time.monotonic() + seconds, act)

    def cancel(self, key: Hashable) -> None:
        """Forget a deadline, if there is one."""
        self._timers.pop(key, None)

    def run(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        """Wait and call back until ``done()``, or until ``deadline`` (``time.monotonic``)."""
        while not done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            times = [when for when, _ in self._timers.values()]
            if deadline is not None:
                times.append(deadline)
            for key, _ in self._selector.select(max(0.0, min(times) - now) if times else None):
                current = self._selector.get_map().get(key.fd)
                if (
                    current is not None and current.data is key.data
                ):  # not removed by the function that was called just before
                    key.data()
            self._run_timers()

    def close(self) -> None:
        self._selector.close()

    def _run_timers(self) -> None:
        now = time.monotonic()
        for key, (deadline, act) in list(self._timers.items()):
            if deadline <= now and self._timers.get(key) == (deadline, act):
                del self._timers[key]
                act()
