"""The examples of single capabilities, started as their users start them; each must learn, and only rank 0 speak."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCE = Path(horovod.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "command",
    [
        "pytorch_adasum.py",
        "pytorch_powersgd.py",
        "pytorch_powersgd.py --compression topk",
        "pytorch_uneven_data.py",
    ],
)
def test_two_ranks_learn(command: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(EXAMPLES / script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"[0]<stdout>:epoch {epoch}" for epoch in range(1, 6)]
    accuracies = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 5 and accuracies[-1] > 82, done.stdout
    losses = [float(found) for found in re.findall(r"training loss ([\d.]+)", done.stdout)]
    assert not losses or losses[-1] < 0.5 * losses[0], done.stdout
    if script == "pytorch_uneven_data.py":
        assert done.stdout.count("steps by rank [15, 30], rank 1 was last") == 5
