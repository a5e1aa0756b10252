"""Worker threads of several ranks for one test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from unit.core.workers import Set


@pytest.fixture
def process_set() -> Iterator[Set]:
    made = Set()
    yield made
    made.close()


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cores as any set here has ranks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
