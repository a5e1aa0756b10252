"""Ranks are killed, stopped and crash at random, and others come, while a script chooses the members of its default group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from part import some
from time_limits import JOB
from torch_versions import needs_torch

PROGRAM = Path(__file__).resolve().parents[1] / "reconfigure_events.py"


@needs_torch("2.6", "C++ code that asks a group in Python for its size")
@pytest.mark.parametrize("seed", some([1, 2], [1]))
def test_the_others_go_on_to_the_result_of_one_process(seed: int) -> None:
    """``python tests/reconfigure_events.py --jobs 20 --events 15`` plays more."""
    pytest.importorskip("torch")
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--events", "8", "--seed", str(seed), "--log"],
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 events, right" in ended.stdout
