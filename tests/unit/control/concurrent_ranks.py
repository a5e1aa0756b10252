"""Several ranks inside this one process: one thread each, all waited for within a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from time_limits import SOON


class ConcurrentCalls:
    """Functions that run at the same time, from the start of a ``with`` block on, or until :meth:`outcomes`."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self._found: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number, function), name=f"test-{number}", daemon=True)
            for number, function in enumerate(functions)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, function: Callable[[], Any]) -> None:
        try:
            self._found[number] = function()
        except BaseException as error:
            self._found[number] = error

    def outcomes(self, seconds: float = SOON) -> list[Any]:
        """What each returned or raised, in order."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [number for number, thread in enumerate(self._threads) if thread.is_alive()]
        assert not hanging, f"{hanging} did not end within {seconds:g} seconds; the others: {self._found}"
        return [self._found[number] for number in range(len(self._threads))]

    def results(self, seconds: float = SOON) -> list[Any]:
        """What each returned; the first exception is raised."""
        outcomes = self.outcomes(seconds)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes


def run_concurrently(*functions: Callable[[], Any], seconds: float = SOON) -> list[Any]:
    """Run ``functions`` at the same time and return what they return."""
    return ConcurrentCalls(*functions).results(seconds)


def wait_until(condition: Callable[[], Any], what: str = "it", seconds: float = SOON) -> None:
    """Return as soon as ``condition()`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} seconds"
        time.sleep(0.002)


def errors(outcomes: Sequence[Any]) -> list[str]:
    """The texts of those outcomes that are exceptions."""
    return [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
