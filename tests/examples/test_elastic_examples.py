"""The elastic examples as their readers start them first: with a fixed number of processes, which learn one model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCE = Path(horovod.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("framework", "command", "pattern", "least"),
    [
        ("torch", "pytorch_mnist_elastic.py --epochs 3", r"reads ([\d.]+)%", 80.0),
        ("torch", "pytorch_mnist_elastic.py --epochs 3 --rollback step", r"reads ([\d.]+)%", 80.0),
        ("tensorflow", "tensorflow2_mnist_elastic.py --epochs 3", r"test accuracy ([\d.]+)%", 75.0),
        ("tensorflow", "tensorflow2_keras_mnist_elastic.py --epochs 3", r"val_accuracy: ([\d.]+)", 0.75),
    ],
)
def test_two_processes_learn(tmp_path: Path, framework: str, command: str, pattern: str, least: float) -> None:
    pytest.importorskip(framework)
    pytest.importorskip("sklearn")
    script, *arguments = command.split()
    assert f"horovodrun -np 2 python examples/{script}" in (EXAMPLES / script).read_text()
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    environment |= {"PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(EXAMPLES / script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    scores = [float(found) for found in re.findall(pattern, done.stdout)]
    assert len(scores) == 3 and scores[-1] > least, done.stdout
    assert "[1]<stdout>" not in done.stdout, "one process speaks"
