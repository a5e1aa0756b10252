"""Ranks on two hosts that no launcher of ours has started: by torchrun, as pods of a PyTorchJob, with variables set by hand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cluster.conftest import write
from cluster.hosts import ADDRESSES, INTERFACES, Hosts
from cluster.training import TRAINING, Outcome, outcomes
from launcher.harness import Launcher
from part import some
from time_limits import SOON

LIMIT_SECONDS = SOON
HOSTS = ("hostA", "hostB")
RANK = """
import sys
import numpy, plain
from horovod.common import basics
plain.init()
(total,) = plain.allreduce(numpy.ones(1, numpy.float32), "total")
assert total == plain.size()
numbers = plain.rank(), plain.size(), basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size()
sys.stdout.write("rank " + " ".join(map(str, numbers)) + "\\n")  # in one write: ranks share the pipe
sys.stdout.flush()
"""
FAILING = """
import os
plain.allreduce(numpy.ones(1, numpy.float32), "all have printed")
if plain.rank() == plain.size() - 1 and not os.path.exists("failed"):
    open("failed", "w").close()
    os._exit(7)
plain.allreduce(numpy.ones(1, numpy.float32), "second")
plain.shutdown()
"""
"""To follow :data:`RANK`: the last rank fails when all have met for the first time."""


class TwoHosts:
    """Commands on both hosts at a time."""

    def __init__(self, hosts: Hosts, launcher: Launcher) -> None:
        self.hosts = hosts
        self.folder = launcher.folder
        self._launcher = launcher
        self.script(RANK)

    def script(self, program: str) -> None:
        """Have the ranks run this instead of :data:`RANK`."""
        write(self.folder, program)

    def start(self, host: str, command: Sequence[str | Path], **extra: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.hosts.on(host, *command, folder=self.folder),
            env=self._launcher.environment(OMP_NUM_THREADS="1", **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._launcher.started.append(process)
        return process

    @staticmethod
    def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
        """The lines that the ranks print at their end, in order."""
        ended = [(process.communicate(timeout=LIMIT_SECONDS), process.returncode) for process in processes]
        said = "\n".join(error for (_, error), _ in ended)
        assert [status for _, status in ended] == [0] * len(processes), said
        return sorted(line for (out, _), _ in ended for line in out.splitlines() if line.startswith("rank"))


@pytest.fixture
def two(hosts: Hosts, tmp_path: Path) -> Iterator[TwoHosts]:
    pytest.importorskip("torch")
    launcher = Launcher(tmp_path)
    try:
        yield TwoHosts(hosts, launcher)
        hosts.await_nothing(10)
    finally:
        for process in launcher.started:
            process.kill()
            process.communicate(timeout=LIMIT_SECONDS)
        for name in hosts.init:
            for pid in hosts.processes(name):
                subprocess.run(["kill", "-9", str(pid)], check=False)


STATIC = ("--master-addr", ADDRESSES["hostA"], "--master-port", "29511")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['hostA']}:29512", "--rdzv-id", "job")


def torchrun(two: TwoHosts, words: Sequence[str], per_host: Sequence[int], **extra: str) -> list[subprocess.Popen[str]]:
    started = []
    for number, host in enumerate(HOSTS):
        node = ("--node-rank", str(number)) if "--master-addr" in words else ("--local-addr", ADDRESSES[host])
        count = ("--nnodes", "2", "--nproc-per-node", str(per_host[number]))
        names = {"GLOO_SOCKET_IFNAME": INTERFACES[host], **extra}
        started.append(two.start(host, ["torchrun", *count, *node, *words, "job.py"], **names))
    return started


# Few jobs show all of it, since torchrun imports PyTorch on every host.
RESTARTED = [
    pytest.param(
        STATIC, (1, 2), ["0 3 0 1 0 2", "1 3 0 2 1 2", "2 3 1 2 0 1"], id="static rendezvous, more ranks on one host"
    ),
    pytest.param(C10D, (1, 1), ["0 2 0 1 0 2", "1 2 0 1 1 2"], id="c10d rendezvous"),
]


@pytest.mark.parametrize(
    ("words", "per_host", "expected"),
    some(RESTARTED, RESTARTED[1:]),
)
def test_a_worker_that_fails_once_is_restarted_with_all_others_and_finds_them(
    two: TwoHosts, words: Sequence[str], per_host: Sequence[int], expected: list[str]
) -> None:
    two.script(RANK + FAILING)
    found = two.finish(torchrun(two, ("--max-restarts", "3", "--monitor-interval", "0.3", *words), per_host))
    assert (two.folder / "failed").exists()
    assert found == sorted(2 * [f"rank {numbers}" for numbers in expected]), "in both attempts"


def test_a_training_by_torchrun_has_the_bits_of_one_host(two: TwoHosts, one_host: Outcome) -> None:
    two.script(TRAINING + "train()\n" + RANK)
    ended = [process.communicate(timeout=LIMIT_SECONDS) for process in torchrun(two, C10D, (2, 2))]
    said = "".join(out for out, _ in ended)
    assert outcomes(said) == [("4 2", one_host.digest, one_host.norm)] * 4, ended
    numbers = ["0 4 0 2 0 2", "1 4 1 2 0 2", "2 4 0 2 1 2", "3 4 1 2 1 2"]
    assert sorted(re.findall("rank (.*)", said)) == numbers


def test_a_network_that_leads_nowhere_is_left_out_although_rank_0_serves_the_store(two: TwoHosts) -> None:
    with two.hosts.broken_second_network():
        started = torchrun(two, STATIC, (1, 1), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        ended = [process.communicate(timeout=LIMIT_SECONDS) for process in started]
    assert [out for out, _ in ended] == ["rank 0 2 0 1 0 2\n", "rank 1 2 0 1 1 2\n"], ended
    assert "no rank uses address 10.78.0.1 of hostA: hostB cannot reach it (no answer)" in ended[1][1]


def each_host(two: TwoHosts, *variables: dict[str, str]) -> list[subprocess.Popen[str]]:
    return [two.start(host, ["python", "job.py"], **own) for host, own in zip(HOSTS, variables, strict=True)]


def test_the_pods_of_a_pytorchjob_are_one_job(two: TwoHosts) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_PORT": "23456"}
    master = {**common, "RANK": "0", "MASTER_ADDR": "localhost"}  # as earlier versions of the operator set it there
    worker = {**common, "RANK": "1", "MASTER_ADDR": "hostA"}
    assert two.finish(each_host(two, master, worker)) == ["rank 0 2 0 1 0 2", "rank 1 2 0 1 1 2"]


def test_the_nodes_of_kubeflow_trainer_are_one_job_without_torchrun(two: TwoHosts) -> None:
    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "hostA", "PET_MASTER_PORT": "29400"}
    found = two.finish(each_host(two, *({**common, "PET_NODE_RANK": str(number)} for number in range(2))))
    assert found == ["rank 0 2 0 1 0 2", "rank 1 2 0 1 1 2"]


def test_ranks_whose_variables_are_set_by_hand_are_one_job(two: TwoHosts) -> None:
    common = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "hostA",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
        "HOROVOD_SECRET_KEY": "any text that nobody can guess",
    }
    found = two.finish(each_host(two, *({**common, "HOROVOD_RANK": str(number)} for number in range(2))))
    assert found == ["rank 0 2 0 1 0 2", "rank 1 2 0 1 1 2"]
