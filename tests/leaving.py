"""Ranks that leave a job with the same or with other numbers of steps: what tests of all bindings share. Runs on ranks."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

from horovod.core.lifecycle import context


def departure(binding: str, train: Callable[[int], None], more_on: int) -> list[str]:
    """Train two steps and leave. One rank has made a step more, which no other rank could hear of.

    Args:
        binding: the module with ``shutdown`` and ``rank``.
        train: makes that many steps.
        more_on: that rank; -1: none.

    Returns:
        What this rank is told when it leaves.
    """
    hvd = importlib.import_module(binding)
    train(2)
    if hvd.rank() == more_on:
        steps = context.running().steps
        for sent in steps.sent():
            steps.of(sent.optimizer, sent.ranks, sent.line).made += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.shutdown()
    return [str(each.message) for each in caught if "numbers of steps" in str(each.message)]


def left_alone(binding: str, train: Callable[[int], None]) -> str:
    """Rank 1 leaves after two steps; the error of the other ranks in their third."""
    hvd = importlib.import_module(binding)
    train(2)
    if hvd.rank() == 1:
        hvd.shutdown()
        return ""
    try:
        train(1)
    except Exception as error:
        return str(error)
    return "was not refused"
