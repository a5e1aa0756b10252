"""A rank that answers and stays stuck: what others report of it, until it is blamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unit.control.concurrent_ranks import wait_until

MOST = 100


def complain(reporter: Any, ranks: Sequence[Any]) -> int:
    """Let a rank report again and again that rank 1 makes no progress, until rank 0 blames that; how many reports it took.

    Rank 0 counts a report when all have answered. Answers to a ping before may still be under way when the next report comes:
    then two reports count once.
    """
    judge = ranks[0]
    for times in range(1, MOST):
        judge.monitor.call_sites.clear()
        reporter.monitor.report_no_progress(1, "no progress", times)
        wait_until(lambda: judge.failures or len(judge.monitor.call_sites) == len(ranks), "the answers of all")
        if judge.failures:
            return times
    raise AssertionError(f"rank 1 is not blamed after {MOST} reports")
