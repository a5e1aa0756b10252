"""What a job by mpirun takes from the launcher's environment: names on the command line, values nowhere on it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from horovod.runner.arguments import parse
from horovod.runner.errors import UsageError
from horovod.runner.external.mpi.mpi_job import MpiJob
from horovod.runner.options import Options
from unit.runner.external.mpi.test_command import HYDRA, OPEN_MPI_5, fake_mpirun

OWN = {
    "MINE": "a value",
    "HOME": "/home/me",
    "CUDA_VISIBLE_DEVICES": "3",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "HOROVOD_RANK": "7",
    "HOROVOD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "7",
    "BASH_FUNC_module%%": "() { :; }",
    "a.dotted.name": "x",
}


def options(*words: str) -> Options:
    return parse(["--mpi", "-np", "3", *words, "true"])


def job(folder: Path, version: str, *words: str, **extra: str) -> MpiJob:
    return MpiJob(options("-H", "127.0.0.1:2,far:1", *words), {**OWN, **fake_mpirun(folder, version), **extra})


def test_names_alone_stand_on_the_command_line(tmp_path: Path) -> None:
    words = job(tmp_path, OPEN_MPI_5, "--fusion-threshold-mb", "2").command
    names = [name for flag, name in itertools.pairwise(words) if flag == "-x"]
    assert {"MINE", "PATH", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "_HOROVOD_SECRET_KEY"} <= set(
        names
    )
    assert not {*OWN} - {"MINE"} & set(names)
    assert not [word for word in words if "=" in word and "-o" not in word and not word.startswith("ssh ")]
    assert "a value" not in words


def test_a_list_for_hydra_holds_the_same_names(tmp_path: Path) -> None:
    words = job(tmp_path, HYDRA).command
    names = words[words.index("-genvlist") + 1].split(",")
    assert "_HOROVOD_SECRET_KEY" in names and not {*OWN} - {"MINE"} & set(names)


def test_ssh_reaches_other_hosts_unless_the_user_chooses_another_program(tmp_path: Path) -> None:
    def agent(*words: str, **extra: str) -> str:
        command = job(tmp_path, OPEN_MPI_5, *words, **extra).command
        return command[command.index("plm_ssh_agent") + 1] if "plm_ssh_agent" in command else ""

    assert agent().startswith("ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new")
    assert agent("-p", "2222", "-i", "key").endswith(" -p 2222 -i key")
    assert agent(HOROVOD_SSH_COMMAND="ssh -F file").startswith("ssh -F file -o BatchMode=yes")
    assert agent(OMPI_MCA_plm_rsh_agent="/etc/mpi/kubexec.sh") == ""
    assert agent("-p", "22", OMPI_MCA_plm_rsh_agent="/etc/mpi/kubexec.sh").endswith(" -p 22")


def test_a_job_on_this_host_alone_passes_nothing_on(tmp_path: Path) -> None:
    environment = {**OWN, **fake_mpirun(tmp_path, OPEN_MPI_5)}
    command = MpiJob(options(), environment).command
    assert command[1:] == [
        "--allow-run-as-root", "--tag-output", "-np", "3", "-H", "localhost:3", "--bind-to", "none", "--map-by", "slot", "true",
    ]  # fmt: skip


def test_users_on_hosts_are_refused(tmp_path: Path) -> None:
    environment = {**OWN, **fake_mpirun(tmp_path, HYDRA)}
    with pytest.raises(
        UsageError, match="alice@far: mpirun accepts no user names; set the user for that host in ssh's configuration"
    ):
        MpiJob(options("-H", "alice@far:3"), environment)
