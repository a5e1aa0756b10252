"""The TensorFlow example as its readers start it: two processes learn one model, and one of them speaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensorflow2_mnist.py"
SOURCE = Path(horovod.__file__).resolve().parents[1]


def test_two_processes_learn(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    environment |= {"PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(SCRIPT), "--epochs", "4"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"[0]<stdout>:epoch {epoch}" for epoch in range(1, 5)]
    losses = [float(found) for found in re.findall(r"training loss ([\d.]+)", done.stdout)]
    accuracies = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", done.stdout)]
    assert losses[-1] < 0.3 * losses[0] and accuracies[-1] > 75, done.stdout
