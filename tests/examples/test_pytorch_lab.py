"""The PyTorch lab: every command of its scripts does what the page says, and the notebook runs these commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import horovod
from launcher.harness import EAGER
from part import repeats
from time_limits import JOB

pytest.importorskip("torch")
pytest.importorskip("sklearn")

LAB = Path(__file__).resolve().parents[2] / "examples" / "pytorch_lab"
SOURCE = Path(horovod.__file__).resolve().parents[1]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command of the lab, and return how it ended."""

    def run(command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = shlex.split(command)
        programs = {
            "python": [sys.executable],
            "horovodrun": [sys.executable, "-m", "horovod.runner.launch"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }
        arguments = [str(LAB / each) if each.startswith("step_") else each for each in arguments]
        environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
        return subprocess.run(
            [*programs[program], *(sys.executable if each == "python" else each for each in arguments)],
            cwd=tmp_path,
            env=environment
            | {"PYTHONPATH": os.pathsep.join([str(SOURCE), EAGER]), "HOROVOD_CHECK": "error"}
            | settings,
            capture_output=True,
            text=True,
            timeout=JOB,
        )

    return run


ABORT_AT_THE_END = "terminate called without an active exception"
"""PyTorch 2.13 aborts so after every third or so training of DDP on Gloo, with no Horovod in the script, when all is done."""


def accuracies(done: subprocess.CompletedProcess[str], by_pytorch_alone: bool = False) -> list[float]:
    """What a script said after each epoch."""
    assert done.returncode == 0 or (by_pytorch_alone and ABORT_AT_THE_END in done.stderr), done.stderr
    found = [float(each) for each in re.findall(r"epoch \d: reads ([\d.]+)%", done.stdout)]
    assert len(found) == 5 and found[-1] > 80, done.stdout
    return found


@repeats
def test_one_process_two_ranks_and_ddp_learn_the_same(run: Run) -> None:
    accuracies(run("python step_0_one_process.py"))
    with_hvd = accuracies(run("horovodrun -np 2 python step_1_two_ranks.py"))
    done = run("horovodrun -np 2 --torch-backend horovod python step_4_ddp.py")
    assert accuracies(done) == pytest.approx(with_hvd, abs=1.0) and "by horovod" in done.stdout
    done = run("torchrun --nproc-per-node 2 step_4_ddp.py")
    assert accuracies(done, True) == pytest.approx(with_hvd, abs=1.0) and "by gloo" in done.stdout


def test_an_elastic_job_goes_on_with_two_of_three_ranks(run: Run) -> None:
    done = run("horovodrun -np 3 --min-np 2 python step_3_elastic.py --lose-a-rank")
    accuracies(done)
    assert re.findall(r"(\d) ranks$", done.stdout, re.MULTILINE) == ["3", "3", "2", "2", "2"]


def test_the_job_that_hangs_is_ended_and_explained(run: Run, tmp_path: Path) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    done = run("horovodrun -np 2 python step_5_hangs.py", HOROVOD_FLIGHT_RECORDER_DIR=str(tmp_path / "found"), **limits)
    assert done.returncode and f"python -m horovod.diagnose {tmp_path / 'found'}" in done.stderr
    told = run(f"python -m horovod.diagnose {tmp_path / 'found'}").stdout
    assert "The ranks diverged" in told and "step_5_hangs.py:22" in told


def test_the_notebook_runs_every_script_and_shows_these_scripts_and_no_failure() -> None:
    cells = json.loads((LAB / "lab.ipynb").read_text())["cells"]
    commands = ["".join(cell["source"]).removeprefix("!") for cell in cells if cell["cell_type"] == "code"]
    for script in LAB.glob("step_*.py"):
        assert any(re.search(rf"python {script.name}", command) for command in commands), script.name
    for cell in cells:
        command, shown = "".join(cell["source"]), ""
        for output in cell.get("outputs", []):
            assert output["output_type"] == "stream"
            shown += "".join(output["text"]).replace("\r\n", "\n")
        assert "Traceback" not in shown
        if re.match("!(cat|diff|tail -n 7) ", command):
            now = subprocess.run(["sh", "-c", command[1:]], cwd=LAB, capture_output=True, text=True, timeout=JOB)
            assert shown == now.stdout, f"the output of {command} is that of other scripts"
