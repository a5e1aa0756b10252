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


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with the entry points of pyproject.toml, as an installation has them."""
    folder = tmp_path / "installed"
    made = folder / "horovod-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0\n")
    point = "horovod = horovod._torch_backend:register"
    (made / "entry_points.txt").write_text(f"[torch.backends]\n{point}\n\n[torch.distributed.backends]\n{point}\n")
    return str(folder)
