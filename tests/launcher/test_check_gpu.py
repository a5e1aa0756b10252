"""``horovodrun --check-gpu`` without a GPU: on CPUs, and on a device and NCCL that stand in for real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from horovod.check_gpu import sections
from horovod.runner import gpu_report
from horovod.runner.gpu_report import SECTION_SETTINGS, Facts, check, plan_of, report
from launcher.harness import Launcher

RANK = Path(__file__).resolve().parents[1] / "check_gpu_rank.py"
CARD = Facts(("a stand-in",), "2.13.0, built for CUDA 13", 23203, "/lib/libnccl.so.2")


def test_every_section_has_its_limit_and_all_fit_into_five_minutes_of_a_usual_machine() -> None:
    assert set(sections.SECTIONS) == set(SECTION_SETTINGS)
    assert all(section.seconds <= gpu_report.SECONDS / 3 for section in SECTION_SETTINGS.values())


@pytest.mark.parametrize(
    ("facts", "ranks", "environment", "told"),
    [
        (Facts(torch="2.13"), 2, {}, "There is no GPU"),
        (CARD, 2, {"HOROVOD_GPU_OPERATIONS": "NCCL", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "share the one GPU"),
        (CARD._replace(nccl=22705), 2, {}, "NCCL 2.27.5 refuses two ranks on one GPU"),
        (CARD._replace(nccl=0, where="libnccl.so.2 was not found in /lib"), 2, {}, "not found in /lib"),
        (CARD._replace(gpus=("a", "b", "c")), 3, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, "3 ranks, each with a GPU"),
    ],
)
def test_the_plan_follows_from_what_is_there(facts: Facts, ranks: int, environment: dict[str, str], told: str) -> None:
    plan = plan_of(facts)
    assert (plan.ranks, plan.environment) == (ranks, environment) and told in plan.summary


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch takes no backend in Python",
)
def test_sections_on_a_device_that_stands_in(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RANK.parent))
    lines: list[str] = []
    command = (sys.executable, str(RANK), stand_in)
    plan, found = check(CARD, command, lines.append, ["operations", "dies"], seconds=200)
    assert [outcome.verdict for outcome in found.values()] == ["passed", "passed"], report(CARD, plan, found)
    assert "all operations, 2 process sets and join are right" in found["operations"].output
    assert "ank 1" in found["dies"].output and len(lines) == 2


def test_a_section_that_fails_or_hangs_is_told_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys, time
if sys.argv[1] == "results": raise ArithmeticError("the sum is wrong")
if sys.argv[1] == "operations": time.sleep(1000)
print("passed:", sys.argv[1])
"""
    limits = {
        name: SECTION_SETTINGS[name]._replace(seconds=6.0) for name in ("results", "operations", "capture", "latency")
    }
    monkeypatch.setattr(gpu_report, "SECTION_SETTINGS", limits)
    plan, found = check(Facts(torch="2.13"), (sys.executable, "-c", program), lambda line: None)
    text = report(Facts(torch="2.13"), plan, found)
    assert found["results"].verdict == "FAILED: ArithmeticError: the sum is wrong"
    assert found["operations"].verdict == "FAILED: did not finish within 6 seconds"
    assert found["capture"].verdict == "left out: there is no GPU" and found["latency"].verdict == "passed"
    assert all(f"{name:>14}: {outcome.verdict}" in text for name, outcome in found.items())


def test_the_command_on_a_machine_without_a_gpu(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = launcher.run("--check-gpu", "engine", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stderr
    assert "There is no GPU that PyTorch can use here" in done.stdout and "engine: passed" in done.stdout
    text = (tmp_path / gpu_report.REPORT).read_text()
    assert "2 ranks; tensors on cpu travel through host memory" in text and f"PyTorch: {torch.__version__}" in text
