"""Each launcher's variables become the right identity, and what does not fit is an error that says what to do.

The variable sets are what the launchers really set: Open MPI 5.0.11, MPICH 5 (Hydra), torchrun of PyTorch 2.13;
Slurm's are those its manual names.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod import environments
from horovod._base import config
from horovod.environments import mpich
from horovod.environments.slurm import parse_tasks_per_node

HOROVODRUN = {
    config.RANK: "3",
    config.SIZE: "4",
    config.LOCAL_RANK: "1",
    config.LOCAL_SIZE: "2",
    config.CROSS_RANK: "1",
    config.CROSS_SIZE: "2",
    config.HOSTNAME: "worker-1",
    config.RENDEZVOUS_ADDRESS: "127.0.0.1",
    config.RENDEZVOUS_PORT: "4000",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "38249",
    "TORCHELASTIC_RUN_ID": "09d6ce7c",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-2659@1",
    "PMIX_HOSTNAME": "vm",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "vm"}
# Intel MPI 2021 sets no PMI_HOSTNAME.
INTEL_MPI = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
    "I_MPI_INFO_NUMA_NODE_NUM": "1",
}
PALS = {  # of a compute node with Cray MPICH, as users of such systems have shown it
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_APID": "4e3b7f0c-1f7c-4cb1-a3b8-7c6b3d8b1b0e",
    "PALS_DEPTH": "1",
    "PALS_SPOOL_DIR": "/var/run/palsd/4e3b7f0c",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_CONTROL_PORT": "20208",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "991",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURMD_NODENAME": "node-3",
}


JSRUN = {  # as IBM documents them; jsrun sets Open MPI's variables, too
    "LSB_JOBID": "812",
    "LSB_MCPU_HOSTS": "h1 2 h2 2",
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "jsm-5",
    "PMIX_HOSTNAME": "h2",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def hydra_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpich, "_launcher_process", lambda: "77/1234")


def test_nothing_set_is_a_job_of_one() -> None:
    who = environments.identity({})
    assert (who.rank, who.size, who.local_rank, who.local_size, who.cross_rank, who.cross_size) == (0, 1, 0, 1, 0, 1)
    assert (who.launcher, who.job) == ("none", "")
    assert who.hostname


@pytest.mark.parametrize(
    ("env", "numbers", "hostname", "launcher", "job"),
    [
        (HOROVODRUN, (3, 4, 1, 2, 1, 2), "worker-1", "horovodrun", ""),
        (TORCHRUN, (1, 2, 1, 2, 0, 1), None, "torchrun", "torchrun/09d6ce7c/localhost/38249/0"),
        (OPEN_MPI_5, (1, 2, 1, 2, 0, 1), "vm", "Open MPI", "open-mpi/prterun-vm-2659@1"),
        (HYDRA, (1, 2, 1, 2, 0, 1), "vm", "MPICH", "mpich/77/1234"),
        (INTEL_MPI, (3, 4, 0, 1, 3, 4), None, "MPICH", "mpich/77/1234"),
        (PALS, (5, 8, 1, 4, 1, 2), None, "PALS", "pals/4e3b7f0c-1f7c-4cb1-a3b8-7c6b3d8b1b0e"),
        (SLURM, (5, 7, 1, 2, 2, 3), "node-3", "slurm", "slurm/991/0/"),
    ],
)
def test_identity(env: dict[str, str], numbers: tuple[int, ...], hostname: str | None, launcher: str, job: str) -> None:
    who = environments.identity(env)
    assert (who.rank, who.size, who.local_rank, who.local_size, who.cross_rank, who.cross_size) == numbers
    assert (who.launcher, who.job) == (launcher, job)
    assert hostname is None or who.hostname == hostname


def test_the_launcher_nearest_to_the_process_wins() -> None:
    everything = {**SLURM, **HYDRA, **OPEN_MPI_5, **TORCHRUN}
    assert environments.detect({**everything, **HOROVODRUN}).name == "horovodrun"
    assert environments.detect(everything).name == "torchrun"
    assert environments.detect({**SLURM, **HYDRA, **OPEN_MPI_5}).name == "Open MPI"
    assert environments.detect({**SLURM, **HYDRA}).name == "MPICH"


def test_pals_tells_the_number_of_ranks_through_pmi_alone() -> None:
    env = {name: value for name, value in PALS.items() if not name.startswith("PMI")} | {"PALS_PMI": "pmix"}
    with pytest.raises(ValueError, match=r"PMI_SIZE is missing.*PALS.*mpiexec -n 8 --env PMI_SIZE=8"):
        environments.identity(env)


def test_aprun_of_alps_needs_what_pals_would_say() -> None:
    env = {"ALPS_APP_PE": "3", "ALPS_APP_DEPTH": "1"}
    with pytest.raises(ValueError, match="PMI_SIZE is missing"):
        environments.identity(env)
    who = environments.identity({**env, "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"})
    assert (who.rank, who.size, who.local_rank, who.local_size) == (3, 4, 1, 2)


def test_mpi_does_not_say_which_hosts_have_which_ranks() -> None:
    assert not any(environments.identity(env).local_ranks_known for env in (OPEN_MPI_5, HYDRA, INTEL_MPI, PALS))
    assert all(environments.identity(env).local_ranks_known for env in ({}, HOROVODRUN, TORCHRUN, SLURM))


def test_slurm_with_its_own_pmi_is_slurm() -> None:
    assert environments.detect({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}).name == "slurm"


@pytest.mark.parametrize("step", [None, "", "4294967291", "4294967290"])
def test_a_batch_script_without_srun_is_alone(step: str | None) -> None:
    env = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    if step is not None:
        env["SLURM_STEP_ID"] = step
    assert environments.identity(env).size == 1


def test_slurm_tells_the_nodes_of_a_step_and_its_reserved_ports() -> None:
    step = {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert environments.host_list({**SLURM, **step}) == (("n2", "n3"), "n2", ())
    ports = environments.host_list({**SLURM, **step, "SLURM_STEP_RESV_PORTS": "12000-12001"})
    assert ports is not None and ports.ports == (12000, 12001)
    # A file that places tasks may begin with any node, and the list is sorted.
    anywhere = environments.host_list({**SLURM, **step, "SLURM_DISTRIBUTION": "arbitrary"})
    assert anywhere is not None and anywhere.of_rank_0 == ""
    with pytest.raises(ValueError, match=r"'n\[2-'.*slurm"):
        environments.host_list({**SLURM, "SLURM_STEP_NODELIST": "n[2-"})


def test_most_launchers_tell_no_hosts() -> None:
    assert environments.host_list({}) is environments.host_list(OPEN_MPI_5) is environments.host_list(SLURM) is None


def test_ranks_of_jsrun_know_their_places_and_lsfs_hosts() -> None:
    who = environments.identity(JSRUN)
    assert (who.rank, who.size, who.local_rank, who.local_size, who.cross_rank, who.cross_size) == (2, 4, 0, 2, 1, 2)
    assert (who.launcher, who.hostname, who.job, who.local_ranks_known) == ("jsrun", "h2", "jsrun/812/jsm-5", False)
    assert environments.host_list(JSRUN) == (("h1", "h2"), "", ())
    only_open_mpis = {name: value for name, value in JSRUN.items() if not name.startswith("JSM_NAMESPACE_LOCAL")}
    assert environments.identity(only_open_mpis) == who
    with pytest.raises(ValueError, match=r"LSB_MCPU_HOSTS='h1'.*jsrun"):
        environments.host_list({**JSRUN, "LSB_MCPU_HOSTS": "h1"})


def test_cyclic_tasks_have_their_nodes_local_ranks() -> None:
    # srun -n5 -m cyclic on three nodes: tasks 0 3, 1 4, 2
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    found = []
    for rank, (node, local) in enumerate([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]):
        who = environments.identity(
            {**step, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        )
        found.append((who.rank, who.local_rank, who.local_size, who.cross_rank, who.cross_size))
    assert found == [(0, 0, 2, 0, 3), (1, 0, 2, 1, 3), (2, 0, 1, 2, 3), (3, 1, 2, 0, 2), (4, 1, 2, 1, 2)]


def test_open_mpi_4_names_its_job_otherwise() -> None:
    env = {key: value for key, value in OPEN_MPI_5.items() if not key.startswith("PMIX")}
    assert environments.identity({**env, "OMPI_MCA_ess_base_jobid": "123456"}).job == "open-mpi/123456"
    with pytest.raises(ValueError, match=r"PMIX_NAMESPACE.*Open MPI"):
        environments.identity(env)


def test_a_restarted_torchrun_group_is_another_job() -> None:
    again = environments.identity({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job != environments.identity(TORCHRUN).job


def test_mpich_without_a_launcher_above_cannot_name_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpich, "_launcher_process", lambda: None)
    with pytest.raises(ValueError, match="hydra_pmi_proxy"):
        environments.identity(HYDRA)


@pytest.mark.parametrize(
    ("env", "change", "fragments"),
    [
        (HOROVODRUN, {config.RANK: "x"}, [f"{config.RANK}='x'", "whole number", "horovodrun -np"]),
        (HOROVODRUN, {config.RANK: "4"}, [f"{config.RANK}='4'", f"{config.SIZE}='4'"]),
        (HOROVODRUN, {config.RANK: "-1"}, [f"{config.RANK}='-1'", "negative"]),
        (HOROVODRUN, {config.SIZE: ""}, [config.SIZE, "missing"]),
        (HOROVODRUN, {config.LOCAL_SIZE: "0"}, [f"{config.LOCAL_SIZE}='0'"]),
        (HOROVODRUN, {config.LOCAL_SIZE: "9"}, [f"{config.LOCAL_SIZE}='9'", config.SIZE]),
        (HOROVODRUN, {config.CROSS_RANK: "2"}, [f"{config.CROSS_RANK}='2'", config.CROSS_SIZE]),
        (HOROVODRUN, {config.RENDEZVOUS_ADDRESS: ""}, [config.RENDEZVOUS_ADDRESS]),
        (TORCHRUN, {"LOCAL_RANK": ""}, ["LOCAL_RANK is missing", "torchrun"]),
        (OPEN_MPI_5, {"OMPI_COMM_WORLD_SIZE": "1"}, ["OMPI_COMM_WORLD_RANK='1'", "mpirun"]),
        (HYDRA, {"MPI_LOCALNRANKS": "two"}, ["MPI_LOCALNRANKS='two'", "MPICH"]),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE='2(x'", "srun"]),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2,2"}, ["SLURM_NODEID='2'"]),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, ["adds up to 8", "SLURM_STEP_NUM_TASKS='7'"]),
    ],
)
def test_errors_name_the_variable_its_value_and_the_launcher(
    env: dict[str, str], change: dict[str, str], fragments: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        environments.identity({**env, **change})
    for fragment in fragments:
        assert fragment in str(caught.value)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks_per_node_expands(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in groups)
    assert parse_tasks_per_node(text) == [tasks for tasks, times in groups for _ in range(times)]
