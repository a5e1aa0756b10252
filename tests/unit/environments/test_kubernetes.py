"""Ranks in pods, and ranks set by hand: who they are, and where they find rank 0.

PyTorchJob's variables are those that its documentation names, Kubeflow Trainer's those that torchrun reads.
"""

from __future__ import annotations

import pytest

from horovod import environments
from horovod._base import config
from horovod._base.process_identity import Rank0

PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456"}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "38249",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {config.RANK: "1", config.SIZE: "2", config.RENDEZVOUS_ADDRESS: "node-a", config.RENDEZVOUS_PORT: "4000"}


@pytest.mark.parametrize(
    ("env", "rank", "size", "rank_0"),
    [
        (PYTORCHJOB, 1, 3, Rank0("mnist-master-0", 23456)),
        ({**PYTORCHJOB, "PET_NPROC_PER_NODE": "1"}, 1, 3, Rank0("mnist-master-0", 23456)),
        (TRAINER, 1, 2, Rank0("job-node-0-0.job", 29400)),
        ({**TRAINER, "PET_NNODES": "2:2"}, 1, 2, Rank0("job-node-0-0.job", 29400)),
        (TORCHRUN, 3, 5, Rank0("node-a", 38249, "run")),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, 3, 5, Rank0("node-a", 38249)),
        (BY_HAND, 1, 2, None),
    ],
)
def test_one_rank_of_several_knows_who_it_is_and_where_rank_0_is(
    env: dict[str, str], rank: int, size: int, rank_0: Rank0 | None
) -> None:
    who = environments.identity(env)
    assert (who.rank, who.size, who.local_ranks_known, who.rank_0) == (rank, size, False, rank_0)


def test_torchrun_on_one_host_needs_no_rank_0_to_be_found() -> None:
    who = environments.identity({**TORCHRUN, "WORLD_SIZE": "3", "RANK": "1"})
    assert (who.local_rank, who.local_size, who.local_ranks_known, who.rank_0) == (1, 3, True, None)


def test_hosts_that_the_user_names_are_used() -> None:
    local_ranks = {config.LOCAL_RANK: "0", config.LOCAL_SIZE: "1", config.CROSS_RANK: "1", config.CROSS_SIZE: "2"}
    who = environments.identity({**BY_HAND, **local_ranks})
    assert (who.local_rank, who.local_size, who.cross_rank, who.cross_size, who.local_ranks_known) == (0, 1, 1, 2, True)


def test_ranks_that_torchrun_started_in_a_pod_are_torchruns() -> None:
    assert environments.detect({**TRAINER, **PYTORCHJOB, **TORCHRUN}).name == "torchrun"


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"},  # for an srun that is still to come
        {"RANK": "colonel", "WORLD_SIZE": "large"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "PMIX_RANK": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
        {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh", "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
        {"MASTER_ADDR": "localhost"},
    ],
)  # fmt: skip
def test_what_ordinary_shells_and_containers_carry_is_a_job_of_one(env: dict[str, str]) -> None:
    assert environments.identity(env).size == 1


@pytest.mark.parametrize(
    ("env", "fragments"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK='0', WORLD_SIZE='2', no MASTER_ADDR, no MASTER_PORT", "PyTorchJob"]),
        ({"RANK": "3", "WORLD_SIZE": "1"}, ["RANK must be below WORLD_SIZE"]),
        ({**PYTORCHJOB, "MASTER_PORT": ""}, ["no MASTER_PORT", "set MASTER_ADDR and MASTER_PORT"]),
        ({**PYTORCHJOB, "RANK": "3"}, ["RANK='3' must be below WORLD_SIZE='3'"]),
        ({**PYTORCHJOB, "MASTER_PORT": "0"}, ["MASTER_PORT='0' is not the number of a port"]),
        (
            {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4"},
            ["PET_NPROC_PER_NODE='4'", "run `torchrun` instead of `python`"],
        ),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, ["no WORLD_SIZE", "as if torchrun had started it"]),
        ({**TORCHRUN, "MASTER_ADDR": ""}, ["MASTER_ADDR is missing", "torchrun"]),
        ({**TRAINER, "PET_NPROC_PER_NODE": "4"}, ["PET_NPROC_PER_NODE='4'", "torchrun"]),
        ({**TRAINER, "PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE='auto'", "numProcPerNode to 1"]),
        ({**TRAINER, "PET_NNODES": "1:4"}, ["PET_NNODES='1:4'"]),
        ({**TRAINER, "PET_MASTER_ADDR": ""}, ["PET_MASTER_ADDR is missing"]),
        ({**TRAINER, "PET_NODE_RANK": ""}, ["PET_NODE_RANK is missing"]),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, ["PET_NPROC_PER_NODE='4'"]),
        ({config.RENDEZVOUS_ADDRESS: "node-a"}, [f"no {config.RANK}, no {config.SIZE}", "horovodrun"]),
        ({"PALS_RANKID": "2"}, ["PMI_SIZE is missing", "PALS"]),
        ({"PMIX_RANK": "2"}, ["PMIX_RANK='2'", "PMIx"]),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"}, ["JSM_NAMESPACE_LOCAL_SIZE is missing", "jsrun"]),
    ],
)
def test_one_rank_of_several_that_cannot_be_understood_is_never_a_job_of_one(
    env: dict[str, str], fragments: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        environments.identity(env)
    for fragment in fragments:
        assert fragment in str(caught.value)
