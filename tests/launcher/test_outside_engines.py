"""Engines that a package brings, under the entry point ``horovod.engines``."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.harness import Launcher
from part import some
from time_limits import SOON

SOURCE = Path(__file__).resolve().parents[1] / "outside_engine.py"

SCRIPT = """
import numpy as np, torch
import horovod.torch as hvd
from horovod.core.lifecycle import context

hvd.init()
if hvd.size() > 1:
    assert context.current().workers[0].communicator.name == "outside"
ones = torch.arange(1 << 20, dtype=torch.float32)
assert torch.equal(hvd.allreduce(ones, op=hvd.Sum), ones * hvd.size())
assert hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank())).tolist() == [r for r in range(hvd.size()) for _ in range(r + 1)]
assert hvd.broadcast(torch.tensor(hvd.rank()), 1 % hvd.size()).item() == 1 % hvd.size()
print("moved by a package's engine", flush=True)
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    """The folder into which pip has installed the package."""
    wheel = tmp_path / "outside_engine-1.0-py3-none-any.whl"
    about = "outside_engine-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("outside_engine.py", SOURCE.read_text())
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: outside-engine\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{about}/entry_points.txt",
            "[horovod.engines]\noutside = outside_engine:OutsideEngine\nbroken = outside_engine:NoSuchEngine\n",
        )
        archive.writestr(f"{about}/RECORD", "")
    target = tmp_path / "installed"
    words = [
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", *words], check=True, timeout=SOON)
    return str(target)


@pytest.mark.parametrize("ranks", some([1, 2, 3], [2]))
def test_a_job_runs_on_the_engine_of_a_package(launcher: Launcher, tmp_path: Path, package: str, ranks: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"PYTHONPATH": package, "HOROVOD_CPU_OPERATIONS": "outside"}
    ended = launcher.run("-np", str(ranks), "python", "train.py", **env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("moved by a package's engine") == ranks


def test_an_engine_that_only_some_ranks_have_is_an_error_that_names_one_without(
    launcher: Launcher, tmp_path: Path, package: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nif os.environ['HOROVOD_RANK'] == '0':\n"
        f"    sys.path.append({package!r})\n"
        "import horovod.torch as hvd\nhvd.init()\n"
    )
    ended = launcher.run("-np", "2", "python", "train.py", HOROVOD_CPU_OPERATIONS="outside")
    assert ended.returncode == 1
    assert "HOROVOD_CPU_OPERATIONS=outside cannot serve this group: rank 1: there is no such engine" in ended.stderr


def test_an_engine_that_cannot_be_loaded_says_why(launcher: Launcher, tmp_path: Path, package: str) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\nhvd.init()\n")
    env = {"PYTHONPATH": package, "HOROVOD_CPU_OPERATIONS": "broken"}
    ended = launcher.run("-np", "2", "python", "train.py", **env)
    assert ended.returncode == 1
    assert "rank 0: outside_engine:NoSuchEngine cannot be loaded: AttributeError" in ended.stderr
