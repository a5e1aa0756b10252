"""The process that ends a job whose launcher was killed; here, what the launcher does when it needs it no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from horovod.runner.agent import guardian
from horovod.runner.agent.guardian import Guardian


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_guardian_leaves_nothing_behind_even_if_it_is_stopped(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "_EXIT_SECONDS", 0.2 if stopped else 60.0)
    before = children()
    with Guardian(b"_NO_SUCH_MARK=1", dict(os.environ)):
        (process,) = children() - before
        if stopped:
            os.kill(process, signal.SIGSTOP)
    assert not Path(f"/proc/{process}").exists()
