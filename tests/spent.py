"""What the tests cost: processor time and duration, by folder, and the tests with the most processor time, if it is a second.

Processor time is that of pytest's own process and of all processes that it starts, pools of ranks and launchers included. A
busy machine changes it little. It is measured from the end of one test to that of the next, and travels to pytest's main
process with a report. For a test that is over at once, only pytest's own process is looked at; what others use meanwhile counts
for the next test that takes longer.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = 25
_AT_ONCE_SECONDS = 0.03


def processor_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    ticks, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        try:
            # Of the process itself and of its children that have ended: fields 14 to 17 of the whole line.
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, fields))
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208  names alone, and fast
                pending += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
        except OSError:
            pass  # it has ended meanwhile, and counts in its parent from now on
    return ticks / _TICKS


class Spent:
    """A plugin of pytest: measures where tests run, and shows the sums where they are reported."""

    def __init__(self) -> None:
        self._last, self._own, self._began = processor_seconds(), time.process_time(), time.monotonic()
        self._collecting = 0.0
        self._tests: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def pytest_collection_finish(self) -> None:
        self._collecting = self._since_last(all_processes=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # of a process that runs a part of the tests
            session.config.workeroutput["collecting"] = self._collecting

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._collecting += getattr(node, "workeroutput", {}).get("collecting", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        if report.when == "teardown":  # the last of a test
            report.processor_seconds = self._since_last(time.monotonic() - self._began > _AT_ONCE_SECONDS)
        return report

    def _since_last(self, all_processes: bool) -> float:
        """The processor seconds since the last call: of all processes, or of this one."""
        own, self._began = time.process_time(), time.monotonic()
        spent, self._own = own - self._own, own
        now = processor_seconds() if all_processes else self._last + spent
        # What a process has used is gone when it ends as nobody's child, as daemons do; it was counted while they lived.
        spent, self._last = max(0.0, now - self._last), now
        return spent

    def pytest_runtest_logreport(self, report: Any) -> None:
        processor, duration = self._tests[report.nodeid]
        self._tests[report.nodeid] = (processor + getattr(report, "processor_seconds", 0.0), duration + report.duration)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for name, (processor, duration) in self._tests.items():
            parts = Path(name.partition("::")[0]).parts
            for index, each in enumerate((processor, duration, 1)):
                folders["/".join(parts[: -1 if len(parts) < 3 else 2])][index] += each
        if not folders:
            return
        terminalreporter.section("processor time in seconds, and duration")
        rows = [
            (processor, duration, f"{folder}: {number:.0f} tests")
            for folder, (processor, duration, number) in folders.items()
        ]
        tests = [(*spent, name) for name, spent in self._tests.items() if spent[0] >= 1.0]
        for processor, duration, what in [*sorted(rows, reverse=True), *sorted(tests, reverse=True)[:_SHOWN]]:
            terminalreporter.write_line(f"{processor:8.1f} {duration:8.1f}  {what}")
        terminalreporter.write_line(f"{self._collecting:8.1f}           to find the tests, in all processes of pytest")
