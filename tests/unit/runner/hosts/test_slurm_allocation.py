"""What Slurm's variables say about an allocation, and where ranks may run in it. As Slurm 22.05 sets them."""

from __future__ import annotations

import pytest

from horovod.runner.hosts.host_sources import SlurmNodes, ThisHost, choose
from horovod.runner.hosts.slots import HostInfo, get_host_assignments
from horovod.runner.hosts.slurm_allocation import allocation
from horovod.runner.options import Options

SALLOC = {  # salloc -N2 -n3, on a login node
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}
BATCH = {  # sbatch -N2, which says nothing of tasks
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n1",
}
SHELL = {  # srun -N1 -n1 -c8 --pty bash
    **BATCH,
    "SLURM_JOB_NODELIST": "n2",
    "SLURM_JOB_CPUS_PER_NODE": "8",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURMD_NODENAME": "n2",
}


def hosts_of(environment: dict[str, str], ranks: int) -> list[str]:
    hosts = choose(Options(), environment).hosts(ranks)
    return [slot.hostname for slot in get_host_assignments(hosts, ranks, ranks)]


def test_outside_of_an_allocation_ranks_run_here() -> None:
    assert allocation({}) is None and allocation({"SLURM_CONF": "x"}) is None
    source = choose(Options(), {})
    assert isinstance(source, ThisHost) and source.ranks is None and source.hosts(3) == [HostInfo("localhost", 3)]


def test_hosts_that_the_user_names_come_first() -> None:
    assert choose(Options(hosts="a:1"), SALLOC).hosts(1) == [HostInfo("a", 1)]


def test_tasks_are_slots_and_their_number_is_that_of_the_ranks() -> None:
    source = choose(Options(), SALLOC)
    assert isinstance(source, SlurmNodes) and source.ranks == 3
    assert hosts_of(SALLOC, 3) == ["n1", "n1", "n2"]
    assert hosts_of(SALLOC, 1) == ["n1"]


def test_more_ranks_than_tasks_run_where_there_are_cpus() -> None:
    assert hosts_of(SALLOC, 5) == ["n1"] * 4 + ["n2"]
    assert hosts_of(SHELL, 8) == ["n2"] * 8
    with pytest.raises(ValueError, match=r"more processes \(9\) than there are available slots \(8\)"):
        hosts_of(SALLOC, 9)


def test_without_tasks_the_user_says_how_many() -> None:
    assert choose(Options(), BATCH).ranks is None
    assert hosts_of(BATCH, 9) == ["n1"] * 8 + ["n2"]


@pytest.mark.parametrize("gpus", [{"SLURM_GPUS_PER_NODE": "a100:1,v100:1"}, {"SLURM_GPUS_ON_NODE": "2"}])
def test_gpus_are_slots_where_there_are_no_tasks(gpus: dict[str, str]) -> None:
    environment = {**BATCH, **gpus}
    assert choose(Options(), environment).ranks == 4
    assert hosts_of(environment, 4) == ["n1", "n1", "n2", "n2"]
    assert choose(Options(), {**SALLOC, **gpus}).ranks == 3


def test_the_launchers_own_node_is_known() -> None:
    for environment, here in ((SALLOC, ""), (BATCH, "n1"), (SHELL, "n2"), ({**BATCH, "SLURMD_NODENAME": "login"}, "")):
        found = allocation(environment)
        assert found is not None and found.here == here


def test_a_launcher_that_srun_has_started_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="srun has started this launcher 2 times"):
        choose(Options(), {**SHELL, "SLURM_STEP_NUM_TASKS": "2"}).hosts(2)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_NODELIST": "n[1-"},
        {"SLURM_TASKS_PER_NODE": "2(x"},
        {"SLURM_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_JOB_CPUS_PER_NODE": "x"},
        {"SLURM_GPUS_PER_NODE": "many"},
    ],
)
def test_what_does_not_parse_is_quoted(change: dict[str, str]) -> None:
    (name, value), *_ = change.items()
    with pytest.raises(ValueError) as caught:
        allocation({**SALLOC, **change})
    assert name in str(caught.value) and value in str(caught.value) and "-H" in str(caught.value)
