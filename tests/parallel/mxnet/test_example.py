"""The MXNet example and the program of its page, as their readers start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import horovod
from time_limits import SOON

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "mxnet_mnist.py"
PAGE = ROOT / "docs" / "mxnet.md"
SOURCE = Path(horovod.__file__).resolve().parents[1]


def run(folder: Path, *arguments: str) -> str:
    """What two ranks print."""
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(SOURCE), "HOROVOD_CHECK": "error"},
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_learn_to_read_digits(tmp_path: Path) -> None:
    printed = run(tmp_path, str(SCRIPT), "--epochs", "4")
    lines = printed.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"[0]<stdout>:epoch {epoch}" for epoch in range(1, 5)]
    losses = [float(found) for found in re.findall(r"training loss ([\d.]+)", printed)]
    accuracies = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert losses[-1] < 0.3 * losses[0] and accuracies[-1] > 88, printed


def test_the_example_learns_from_a_file_of_data(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 300)
    images = random.integers(0, 100, (300, 12, 12))
    for image, label in zip(images, labels, strict=True):
        image[4 * label : 4 * label + 4] += 150  # a bright bar: above, in the middle, or below
    np.savez(tmp_path / "data.npz", x=images.astype(np.uint8), y=labels.astype(np.uint8))
    printed = run(tmp_path, str(SCRIPT), "--data", "data.npz", "--epochs", "8")
    assert float(re.findall(r"test accuracy ([\d.]+)%", printed)[-1]) > 90, printed


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_page_run_on_two_ranks(tmp_path: Path, number: int) -> None:
    programs = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    (tmp_path / "train.py").write_text(programs[number])
    assert run(tmp_path, "train.py").splitlines() == ["[0]<stdout>:done"]
