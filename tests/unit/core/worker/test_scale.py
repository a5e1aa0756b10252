"""The simulation of ``benchmarks/scale.py``: what rank 0 decides for many ranks reaches all of them. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCALE = Path(__file__).resolve().parents[4] / "benchmarks" / "scale.py"
RANKS, STEPS = 12, 3


def test_simulated_ranks_follow_one_order_and_are_all_told(tmp_path: Path) -> None:
    # The simulation fails by itself if members follow different orders, get other rows than were sent, or are not told.
    figures = tmp_path / "scale.json"
    command = [
        sys.executable,
        SCALE,
        "--ranks",
        str(RANKS),
        "--steps",
        str(STEPS),
        "--local-ranks",
        "4",
        "--processes",
        "2",
        "--json",
        figures,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["what"]: each for each in json.loads(figures.read_text())["measured"]}
    assert set(found) == {
        "cached",
        "cached, 8 messages",
        "not cached",
        "alltoall",
        "failure",
        "failure of a relay",
        "init",
    }
    cached, again, in_full = found["cached"], found["cached, 8 messages"], found["not cached"]
    assert cached["bytes_to"] < again["bytes_to"] < in_full["bytes_to"]
    assert cached["bytes_to"] < 4 * 161 and cached["bytes_from"] < 4 * 161  # small integers
    assert 0 < found["init"]["bytes_from"] <= RANKS * (found["init"]["bytes_to"] + 8)
    assert found["failure"]["connections"] == found["failure of a relay"]["connections"] == 3 + 2 * 2
