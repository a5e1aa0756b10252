"""Real launchers with real processes: none may be left when its test ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    try:
        yield started
        started.await_nothing()
    finally:
        for number in started.living():
            os.kill(number, signal.SIGKILL)
        for process in started.started:
            process.communicate(timeout=LIMIT_SECONDS)
