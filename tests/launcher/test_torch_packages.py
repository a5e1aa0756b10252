"""The packages that stand on torch.distributed train on two ranks: their examples, as a reader starts them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from launcher.harness import Launcher
from part import some

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 240  # these import a great deal
BY_GLOO = ("--torch-backend", "horovod")


JOBS = [
    ("lightning", "lightning_digits.py", (), "--epochs 3"),
    ("accelerate", "accelerate_digits.py", (), "--epochs 3"),
    ("transformers", "transformers_digits.py", BY_GLOO, "--epochs 3 --backend gloo"),
]
FURTHER = [
    ("lightning", "fabric_digits.py", (), "--epochs 3"),
    ("accelerate", "accelerate_digits.py", BY_GLOO, "--epochs 3 --backend gloo"),
]


@pytest.mark.parametrize(
    ("package", "example", "launched", "arguments"),
    some([*JOBS, *FURTHER], JOBS[:1]),  # the programs of their page train with each of the packages
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_the_example_learns(
    launcher: Launcher, installed: str, package: str, example: str, launched: tuple[str, ...], arguments: str
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[integrations]'")
    path = f"{installed}:{launcher.environment()['PYTHONPATH']}"
    shutil.copy(EXAMPLES / example, launcher.folder)  # alone, as its readers may have it
    command = [sys.executable, example, *arguments.split()]
    process = launcher.start(
        "-np", "2", *launched, *command, PYTHONPATH=path, HF_HUB_OFFLINE="1", HOROVOD_CHECK="error"
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if ":accuracy" in line]
    found = re.search(r"accuracy ([\d.]+) on 2 ranks by (horovod|gloo)", line)
    assert found is not None and float(found[1]) > 0.5, line
    assert found[2] == "horovod", line
    assert not launched or "uses the back end" in err


@pytest.mark.parametrize("package", some(["lightning", "accelerate"], ["lightning"]))
def test_the_elastic_example_goes_on_when_rank_0_is_lost(launcher: Launcher, installed: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[integrations]'")
    path = f"{installed}:{launcher.environment()['PYTHONPATH']}"
    example = f"{package}_elastic.py"
    shutil.copy(EXAMPLES / example, launcher.folder)
    words = ["-np", "3", "--min-np", "2", sys.executable, example, "--lose-a-rank"]
    out, err = launcher.start(*words, PYTHONPATH=path, HF_HUB_OFFLINE="1").communicate(timeout=SECONDS)
    said = re.findall(r"epoch (\d): accuracy ([\d.]+) on (\d) ranks", out)
    assert [(epoch, size) for epoch, _, size in said] == [("1", "3"), ("2", "2"), ("3", "2"), ("4", "2")], out + err
    assert float(said[-1][1]) > 0.8, out
    assert re.search(r"rank 0 on localhost .* was lost while the others were in .*; 2 ranks go on", err), err
