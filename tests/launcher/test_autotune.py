"""``horovodrun --autotune``: flags, log and file as users have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.harness import Launcher

pytest.importorskip("optuna")

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "autotune.md"

TRAIN = """
import numpy as np
import torch
import horovod.torch as hvd
from horovod.core.lifecycle.context import running
hvd.init()
for step in range(20_000):
    for name in ("a", "b"):
        assert (hvd.allreduce(torch.ones(5000), name=name, op=hvd.Sum) == 2).all()
    over = hvd.rank() == 0 and running().workers[0].role.tuner is None
    if hvd.broadcast(torch.tensor(over), 0, name="over"):
        break
print("trained", step, flush=True)
"""


def run(launcher: Launcher, *arguments: str | Path, **env: str) -> tuple[str, str]:
    """Both outputs of a job that succeeds, on a machine that may be busy."""
    process = launcher.start("-np", "2", *arguments, **env)
    printed, complained = process.communicate(timeout=200)
    assert process.returncode == 0, complained
    return printed, complained


def test_a_job_is_tuned_and_the_next_one_knows(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    flags = ["--autotune", "--autotune-log-file", tmp_path / "trials.csv", "--autotune-warmup-samples", "1"]
    flags += ["--autotune-steps-per-sample", "2", "--autotune-bayes-opt-max-samples", "5"]
    flags += ["--autotune-gaussian-process-noise", "0.5"]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed, first = run(launcher, *flags, "python", script, **env)
    assert printed.count("trained") == 2
    assert first.count("autotuning is over after") == 1
    (shown,) = re.findall(r"^autotuning is over.*$", DOCUMENT.read_text(), re.MULTILINE)
    assert re.search(".+".join(map(re.escape, shown.split("..."))), first), first
    (kept,) = (tmp_path / "cache" / "horovod" / "autotune").iterdir()
    assert f"(kept in {kept})" in first
    assert len((tmp_path / "trials.csv").read_text().splitlines()) >= 1 + 5 + 1
    _, again = run(launcher, *flags, "python", script, **env)
    assert "autotuning uses the settings that an earlier run found" in again
    assert "autotuning is over" not in again
