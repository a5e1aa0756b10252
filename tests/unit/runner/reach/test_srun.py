"""How agents are started by srun, and what is said when one cannot be."""

from __future__ import annotations

import pytest

from horovod.runner.reach import srun
from horovod.runner.worker_environment import forwarded


@pytest.mark.parametrize(
    ("status", "errors", "told"),
    [
        (1, "slurmstepd: error: *** STEP 12.3 ON n2 CANCELLED AT 2026-11-23T01:00:00 DUE TO TIME LIMIT ***\nsrun: error: x\n",
         "Slurm ended it: STEP 12.3 ON n2 CANCELLED AT 2026-11-23T01:00:00 DUE TO TIME LIMIT"),
        (1, "ModuleNotFoundError: No module named 'horovod'\nsrun: error: n2: task 0: Exited with exit code 1\n",
         "Horovod is not installed for its Python (ModuleNotFoundError"),
        (2, "slurmstepd: error: execve(): /no/python: No such file or directory\nsrun: error: n2: task 0: Exited\n",
         "the launcher's interpreter does not exist there"),
        (1, "srun: error: Unable to create step: Job/step already completing or completed\n", "the allocation is over"),
        (1, "srun: error: Node failure on n2\n", "Slurm cannot reach it"),
        (-9, "", "srun was killed by SIGKILL"),
        (137, "srun: error: n2: task 0: Killed\n", "ended with exit status 137: srun: error: n2: task 0: Killed"),
        (3, "mine\nsrun: error: n2: task 0: Exited with exit code 3\n", "ended with exit status 3: mine"),
        (0, "", "ended with exit status 0"),
    ],
)  # fmt: skip
def test_why_a_node_cannot_take_part(status: int, errors: str, told: str) -> None:
    assert told in srun.explain(status, errors) and "\n" not in srun.explain(status, errors)


def test_one_task_on_one_node_with_all_of_its_cpus() -> None:
    words = srun.command_line("n2", 8, "/python")
    assert words[0] == "srun" and words[-3] == "/python"
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--cpus-per-task=8", "--overlap"} < set(words)


def test_srun_is_given_the_job_and_not_the_options_of_the_step_around_it() -> None:
    stays = {
        "SLURM_NTASKS": "4", "SLURM_HOSTFILE": "x", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1", "PMI_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0", "_HOROVOD_SECRET_KEY": "s",
    }  # fmt: skip
    travels = {"SLURM_JOB_ID": "5", "SLURM_CONF": "c", "PATH": "/bin", "HOME": "/home/me", "MINE": "1"}
    assert srun.environment({**stays, **travels}) == travels


def test_what_slurm_says_of_a_node_stays_there() -> None:
    travels = {
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_SUBMIT_DIR": "/home/me",
    }
    stays = dict.fromkeys(["SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_GPUS"], "1")
    assert forwarded({**travels, **stays}) == travels
