"""Jobs and process sets made from mpi4py communicators, under ``mpiexec`` of the MPI that came as a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod
from time_limits import SOON

SIZE = 4
MPIEXEC = Path(sys.executable).with_name("mpiexec")
SCENES = Path(__file__).with_name("mpi_scenes.py")
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

pytest.importorskip("mpi4py", reason="mpi4py is not installed; the extras `mpi` and `test` bring it")
pytestmark = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="no MPI is installed beside this Python; pip install mpich"
)


def play(folder: Path, *scenes: str, ends_well: bool = True) -> list[dict[str, Any]]:
    """By rank, what each scene returned.

    Args:
        ends_well: whether the ranks finalize MPI. If they do not, mpiexec may kill those that end last.
    """
    env = {name: value for name, value in os.environ.items() if "HOROVOD" not in name} | OPEN_MPI
    env |= {"PYTHONPATH": str(Path(horovod.__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    command = [str(MPIEXEC), "-n", str(SIZE), sys.executable, str(SCENES), str(folder), *scenes]
    done = subprocess.run(
        command, env=env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 0 or not ends_well, done.stdout + done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All scenes after which MPI is as before, played by the same processes one after another."""
    names = ["whole_and_halves", "sets_of_communicators", "duplicates", "some_left_out", "what_cannot_be", "lists"]
    return play(tmp_path_factory.mktemp("scenes"), *names)


def by_rank(scenes: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in scenes]


def test_a_communicator_is_the_job_and_disjoint_ones_run_side_by_side(scenes: list[dict[str, Any]]) -> None:
    halves = [[1, 2, 1, 2, 1, 2.0], [1, 2, 1, 2, 1, 4.0], [0, 2, 0, 2, 1, 2.0], [0, 2, 0, 2, 1, 4.0]]
    for rank, found in enumerate(by_rank(scenes, "whole_and_halves")):
        world = [rank, 4, rank, 4, 1, 6.0]
        assert found == [world, halves[rank], world]


def test_every_group_of_a_communicator_becomes_a_process_set(scenes: list[dict[str, Any]]) -> None:
    assert by_rank(scenes, "sets_of_communicators") == [
        [1, [0, 2], 0, 2.0, 3, 3.0],
        [2, [1, 3], 0, 4.0, 3],
        [1, [0, 2], 1, 2.0, 3],
        [2, [1, 3], 1, 4.0, 3, 3.0],
    ]


def test_duplicates_are_told_and_the_job_runs(scenes: list[dict[str, Any]]) -> None:
    for rank, (text, ids, everybody, half) in enumerate(by_rank(scenes, "duplicates")):
        assert text.startswith(
            "ValueError: Horovod could not be initialized because process_sets entry number 1 is a duplicate"
        )
        assert ids == [1 + rank % 2, None, None]
        assert (everybody, half) == (6.0, 2.0 + 2 * (rank % 2))


def test_a_process_in_no_group_is_refused_and_the_others_are_a_job(scenes: list[dict[str, Any]]) -> None:
    *members, outsider = by_rank(scenes, "some_left_out")
    assert members == [[3, 3.0]] * 3
    assert "ValueError: Horovod initialization failed: comm is MPI.COMM_NULL" in outsider


def test_communicators_that_cannot_be(scenes: list[dict[str, Any]]) -> None:
    for larger, without, between, later, works in by_rank(scenes, "what_cannot_be"):
        assert larger.startswith("ValueError: Horovod initialization failed: process set ")
        assert "processes that are not in the job's communicator" in larger
        assert without.startswith("NotImplementedError: Process sets made from an mpi4py communicator need a job")
        assert "it is an intercommunicator" in between or "comm is an intercommunicator" in between
        assert later.startswith("NotImplementedError")
        assert works == 6.0


def test_lists_of_ranks_under_mpiexec(scenes: list[dict[str, Any]]) -> None:
    assert by_rank(scenes, "lists") == [[[1, 2, 1.0]] * 2, [[0, 2, 1.0]] * 2, [[1, 2, 5.0]] * 2, [[0, 2, 5.0]] * 2]


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    for found in by_rank(play(tmp_path, "one_does_not_come", ends_well=False), "one_does_not_come")[1:]:
        assert found.startswith(
            "TimeoutError: not all 4 ranks of the communicator called hvd.init(comm=...) within 1 seconds"
        )
