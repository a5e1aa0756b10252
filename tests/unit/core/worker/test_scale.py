"""The simulation of ``benchmarks/scale.py``: what rank 0 decides for many ranks reaches all of them. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from time_limits import JOB

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


def test_many_hosts_are_measured_beside_another_working_tree(tmp_path: Path) -> None:
    # The measurement fails by itself if a sum is wrong, or connections are missing.
    figures = tmp_path / "scale_hosts.json"
    numbers = ["--allreduce", "16", "--ranks", "5", "--all-hosts", "4", "--hosts", "7", "--delays", "1"]
    command = [sys.executable, SCALE.with_name("scale_hosts.py"), "--beside", SCALE.parents[1], *numbers]
    subprocess.run([*command, "--json", figures], check=True, timeout=JOB, capture_output=True)
    measured = json.loads(figures.read_text())["measured"]
    assert [each["what"] for each in measured] == ["allreduce", "allreduce", "rendezvous", "all hosts", "one of"]
    assert all(each["this"].keys() == each["beside"].keys() for each in measured)
    large = measured[1]
    assert large["this"]["bytes"] == large["beside"]["bytes"]
