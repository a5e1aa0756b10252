"""The training of this folder's tests comes to the same bits whatever the machine's libraries choose."""

from __future__ import annotations

from pathlib import Path

from cluster.conftest import write
from cluster.training import TRAINING, Outcome, outcomes
from launcher.harness import Launcher, finish


def test_a_training_does_not_depend_on_how_libraries_compute(tmp_path: Path, one_host: Outcome) -> None:
    write(tmp_path, TRAINING + "train()\n")
    oldest = {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512_SKX AVX2 FMA3"}
    done = finish(Launcher(tmp_path).start("-np", "4", "python", "job.py", **oldest))
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout) == [one_host] * 4
