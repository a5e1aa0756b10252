"""The main example, started as its users start it, on the digits that come with scikit-learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import pytest

import horovod
from launcher.harness import EAGER
from time_limits import SOON

pytest.importorskip("torch")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pytorch_mnist.py"
SOURCE = Path(horovod.__file__).resolve().parents[1]

HOROVODRUN = (sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

STEPS_PER_EPOCH = 22
"""1,437 digits in global batches of 64."""

Example = Callable[..., list[Any]]


def train(starter: tuple[str, ...], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end under one way of starting it; no thread of PyTorch's beyond one per rank."""
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    path = os.pathsep.join([str(SOURCE), EAGER])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOROVOD_CHECK": "error"}
    done = subprocess.run(
        [*starter, str(SCRIPT), "--losses", "record.json", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stderr
    return done


def record(folder: Path) -> dict[str, Any]:
    """What a run wrote with ``--losses``."""
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


class Run(NamedTuple):
    """What a run printed, and wrote with ``--losses``."""

    printed: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs under horovodrun."""
    folder = tmp_path_factory.mktemp("two_epochs")
    return Run(train(HOROVODRUN, folder, "--epochs", "2").stdout, record(folder))


def test_two_ranks_learn_what_one_rank_learns_from_the_whole_batch(example: Example, tmp_path: Path) -> None:
    arguments = f"--batch-size 64 --fixed-global-batch --steps 20 --losses {quote(str(tmp_path))}/record.json"
    example(f"pytorch_mnist.py {arguments}", size=1)
    alone = record(tmp_path)
    example(f"pytorch_mnist.py {arguments}", size=2)
    together = record(tmp_path)
    assert (alone["ranks"], together["ranks"]) == (1, 2)
    assert len(alone["losses"]) == 20
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0], "it should have learned something in 20 steps"


def test_torchrun_and_horovodrun_give_the_same_bits(two_epochs: Run, tmp_path: Path) -> None:
    train(TORCHRUN, tmp_path, "--epochs", "2", "--steps", "5")
    assert record(tmp_path)["losses"] == two_epochs.record["losses"][:5]


def test_a_resumed_run_goes_on_as_if_it_had_not_been_interrupted(
    two_epochs: Run, example: Example, tmp_path: Path
) -> None:
    arguments = (
        f"--epochs 2 --checkpoint-dir {quote(str(tmp_path))}/checkpoints --losses {quote(str(tmp_path))}/record.json"
    )
    example(f"pytorch_mnist.py {arguments} --steps {STEPS_PER_EPOCH}")
    first = record(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0001.pt"]
    example(f"pytorch_mnist.py {arguments}")
    second = record(tmp_path)
    assert first["losses"] + second["losses"] == two_epochs.record["losses"]
    assert second["test_accuracy"] == two_epochs.record["test_accuracy"]


def test_only_rank_0_speaks_and_in_whole_lines(two_epochs: Run) -> None:
    lines = two_epochs.printed.splitlines()
    assert all(line.startswith("[0]<stdout>:") for line in lines), two_epochs.printed
    assert [line.split(":")[1] for line in lines if "images/s" in line] == ["epoch 1/2", "epoch 2/2"]
    assert "test accuracy" in lines[-1]
    assert "\r" not in two_epochs.printed and "\x1b" not in two_epochs.printed, "no bar where nobody can see it move"


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--data", "nowhere.npz"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        len(done.stderr.splitlines()) == 1 and "nowhere.npz" in done.stderr and ".npz file with arrays" in done.stderr
    )
