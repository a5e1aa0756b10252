"""Which tests run. Every change must pass a part, ``make test``; ``make test-all`` sets HOROVOD_TEST_ALL=1 and runs all.

The part has every test but those that repeat, with a whole example, what others find in its parts. What a test draws at random
is drawn fewer times, and of variants that differ in a size, a back end or an optimizer alone, the part has some: each size, and
each back end, in some test of its kind.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("HOROVOD_TEST_ALL") == "1"

repeats = pytest.mark.skipif(not ALL, reason="it repeats, with a whole example, what other tests find: make test-all")


def draws(number: int) -> int:
    """How many of so many random cases run."""
    return number if ALL else -(-number // 3)


def some(variants: Sequence[T], part: Sequence[T]) -> Sequence[T]:
    """All variants, or ``part`` of them."""
    return variants if ALL else part


def one_of(variants: Sequence[T], test: str) -> T:
    """One of the variants, by the test's name: each is in the part in some test."""
    return variants[zlib.crc32(test.encode()) % len(variants)]


def backends_of(test: str) -> Sequence[str]:
    """Keras's back ends that a test runs on: in the part PyTorch, where it takes a tenth of the time, and one of the others, by
    the test's name.
    """
    others = ("jax", "tensorflow")
    return ("torch", *some(others, [one_of(others, test)]))
