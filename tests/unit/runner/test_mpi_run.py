"""Scripts ask which MPI is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.runner import mpi_run
from unit.runner.external.mpi.test_command import HYDRA, INTEL, OPEN_MPI_4, OPEN_MPI_5, SPECTRUM, fake_mpirun

QUESTIONS = ("is_open_mpi", "is_spectrum_mpi", "is_mpich", "is_intel_mpi")


@pytest.mark.parametrize(
    ("text", "yes"),
    [
        (OPEN_MPI_4, "is_open_mpi"),
        (OPEN_MPI_5, "is_open_mpi"),
        (SPECTRUM, "is_spectrum_mpi"),
        (HYDRA, "is_mpich"),
        (INTEL, "is_intel_mpi"),
        ("another program", ""),
    ],
)
def test_one_answer_is_yes(tmp_path: Path, text: str, yes: str) -> None:
    environment = fake_mpirun(tmp_path, text)
    assert mpi_run.mpi_available(environment) == bool(yes)
    assert [name for name in QUESTIONS if getattr(mpi_run, name)(environment)] == ([yes] if yes else [])


def test_without_mpirun_all_answers_are_no_and_this_process_is_asked_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not mpi_run.mpi_available({"PATH": str(tmp_path)})
    monkeypatch.setenv("PATH", fake_mpirun(tmp_path, HYDRA)["PATH"])
    assert mpi_run.is_mpich()
