"""The main example, started as its users start it, on the digits that come with scikit-learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod

pytest.importorskip("torch")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pytorch_mnist.py"
SOURCE = Path(horovod.__file__).resolve().parents[1]

PLAIN = (sys.executable,)
HOROVODRUN = (sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

STEPS_PER_EPOCH = 22
"""1,437 digits in global batches of 64."""


def train(starter: tuple[str, ...], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end under one way of starting it; no thread of PyTorch's beyond one per rank."""
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*starter, str(SCRIPT), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def record_of(starter: tuple[str, ...], folder: Path, *arguments: str) -> dict[str, Any]:
    """What a run that must succeed wrote with ``--losses``."""
    done = train(starter, folder, "--losses", "record.json", *arguments)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return record


def test_two_ranks_learn_what_one_rank_learns_from_the_whole_batch(tmp_path: Path) -> None:
    arguments = ("--batch-size", "64", "--fixed-global-batch", "--steps", "20")
    alone = record_of(PLAIN, tmp_path, *arguments)
    together = record_of(HOROVODRUN, tmp_path, *arguments)
    assert (alone["ranks"], together["ranks"]) == (1, 2)
    assert len(alone["losses"]) == 20
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0], "it should have learned something in 20 steps"


def test_torchrun_and_horovodrun_give_the_same_bits(tmp_path: Path) -> None:
    arguments = ("--steps", "5")
    assert record_of(TORCHRUN, tmp_path, *arguments)["losses"] == record_of(HOROVODRUN, tmp_path, *arguments)["losses"]


def test_a_resumed_run_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    whole = record_of(HOROVODRUN, tmp_path, "--epochs", "2")
    arguments = ("--epochs", "2", "--checkpoint-dir", "checkpoints")
    first = record_of(HOROVODRUN, tmp_path, *arguments, "--steps", str(STEPS_PER_EPOCH))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0001.pt"]
    second = record_of(HOROVODRUN, tmp_path, *arguments)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["test_accuracy"] == whole["test_accuracy"]


def test_only_rank_0_speaks_and_in_whole_lines(tmp_path: Path) -> None:
    done = train(HOROVODRUN, tmp_path, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("[0]<stdout>:") for line in lines), done.stdout
    assert [line.split(":")[1] for line in lines if "images/s" in line] == ["epoch 1/2", "epoch 2/2"]
    assert "test accuracy" in lines[-1]
    assert "\r" not in done.stdout and "\x1b" not in done.stdout, "no moving bar where nobody can see it move"


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    done = train(PLAIN, tmp_path, "--data", "nowhere.npz")
    assert done.returncode == 1
    assert (
        len(done.stderr.splitlines()) == 1 and "nowhere.npz" in done.stderr and ".npz file with arrays" in done.stderr
    )
