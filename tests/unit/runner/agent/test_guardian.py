"""The process that ends a job whose launcher was killed; here, what the launcher does when it needs it no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from horovod.runner.agent import guardian
from horovod.runner.agent.guardian import Guardian


@pytest.mark.parametrize("stopped", [False, True])
def test_a_guardian_leaves_nothing_behind_even_if_it_is_stopped(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "_EXIT_SECONDS", 0.2 if stopped else 60.0)
    with Guardian(b"_NO_SUCH_MARK=1", dict(os.environ)) as watching:
        process = watching._process.pid
        if stopped:
            os.kill(process, signal.SIGSTOP)
    assert not Path(f"/proc/{process}").exists()
