"""Scripts that are written for torchrun, started by horovodrun; and what an installation gives PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.harness import Launcher, finish
from time_limits import SOON
from torch_versions import needs_torch

pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_ddp.py"
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
assert "horovod.torch" not in sys.modules
dist.init_process_group(sys.argv[1])
if dist.get_backend() == "horovod" and sys.argv[1] == "horovod":
    dist.monitored_barrier = dist.barrier  # before 2.15 PyTorch offers it on Gloo only
total = torch.tensor([float(os.environ["LOCAL_RANK"]) + 1])
dist.all_reduce(total)
assert total.item() == 3.0 and dist.get_rank() == int(os.environ["RANK"])
dist.monitored_barrier()
print(type(dist.group.WORLD).__name__, dist.get_backend(), dist.get_world_size())
dist.destroy_process_group()
"""


def run(launcher: Launcher, installed: str, *words: str, **extra: str) -> tuple[list[str], str]:
    (launcher.folder / "train.py").write_text(SCRIPT)
    path = f"{installed}:{launcher.environment()['PYTHONPATH']}"
    done = finish(launcher.start("-np", "2", *words, **{"PYTHONPATH": path, **extra}))
    assert done.returncode == 0, done.stderr
    return sorted(line.split(">:", 1)[1] for line in done.stdout.splitlines()), done.stderr


@needs_torch("2.5", "entry points that import torch calls")
def test_a_script_for_torchrun_runs_unchanged(launcher: Launcher, installed: str) -> None:
    """By Gloo, and by the back end that the installation has registered, without an import."""
    assert run(launcher, installed, "python", "train.py", "gloo")[0] == ["ProcessGroup gloo 2"] * 2
    assert run(launcher, installed, "python", "train.py", "horovod")[0] == ["HorovodProcessGroup horovod 2"] * 2


def test_gloo_can_be_replaced_without_touching_the_script(launcher: Launcher, installed: str) -> None:
    said, told = run(launcher, installed, "--torch-backend", "horovod", "python", "train.py", "gloo")
    assert said == ["HorovodProcessGroup horovod 2"] * 2
    assert told.count('init_process_group("gloo") uses the back end "horovod"') == 1
    said, told = run(launcher, installed, "python", "train.py", "gloo", HOROVOD_TORCH_BACKEND="HOROVOD")
    assert said == ["HorovodProcessGroup horovod 2"] * 2


def test_what_the_user_has_set_of_the_store_stays(launcher: Launcher) -> None:
    show = "import os; print(os.environ.get('MASTER_ADDR'), os.environ.get('MASTER_PORT'), os.environ['RANK'])"
    done = finish(launcher.start("-np", "2", "python", "-c", show, MASTER_ADDR="10.0.0.1"))
    assert sorted(line.split(">:", 1)[1] for line in done.stdout.splitlines()) == [
        "10.0.0.1 None 0",
        "10.0.0.1 None 1",
    ], done.stderr
    done = finish(launcher.start("-np", "2", "python", "-c", show))
    ports = {line.split()[1] for line in done.stdout.splitlines()}
    assert len(ports) == 1 and ports.pop().isdecimal(), done.stdout


def test_an_installation_without_the_entry_point_says_so(launcher: Launcher, tmp_path: Path) -> None:
    empty = tmp_path / "empty" / "horovod-0.dist-info"
    empty.mkdir(parents=True)
    (empty / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0\n")
    path = f"{empty.parent}:{launcher.environment()['PYTHONPATH']}"
    done = finish(launcher.start("-np", "2", "--torch-backend", "horovod", "python", "-c", "pass", PYTHONPATH=path))
    assert done.returncode == 2 and "has no entry point for PyTorch" in done.stderr, done.stderr


def test_the_example_learns(launcher: Launcher, installed: str) -> None:
    pytest.importorskip("sklearn")
    path = f"{installed}:{launcher.environment()['PYTHONPATH']}"
    process = launcher.start("-np", "2", sys.executable, str(EXAMPLE), PYTHONPATH=path)
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if "accuracy" in line]
    assert float(line.split("accuracy ")[1].split()[0]) > 0.85 and line.endswith("on 2 ranks by horovod"), line
