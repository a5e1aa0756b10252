"""What PYTHONPATH says relative to the launcher's folder is meant so on every host."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.runner.jobs import make_job
from horovod.runner.options import Options


def test_a_relative_python_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "src:/opt/lib:"}
    job = make_job(Options(num_proc=2, hosts="elsewhere.invalid:2", command=("python", "train.py")), environment)
    assert f"{tmp_path}/src:/opt/lib:{tmp_path}" in job.dry_run()
