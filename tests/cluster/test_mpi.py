"""``horovodrun --mpi`` on two hosts over a real ssh, with the ``mpirun`` of each MPI that is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

import mpi_wheels
from cluster.conftest import Cluster
from cluster.hosts import INTERFACES
from cluster.test_mpirun import finish, lines
from cluster.training import TRAINING, Outcome, outcomes
from launcher.test_mpi import JOB

SAY_RANKS = "say('RANK', me.rank, me.size, me.local_rank, me.local_size, me.cross_rank, me.cross_size, me.hostname)\n"


class Mpi:
    """Starts jobs from hostA by one MPI's ``mpirun``."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.environment = mpi_wheels.environment(name)

    def start(self, program: str, *words: str, hosts: str = "hostA:1,hostB:1", **extra: str) -> subprocess.Popen[str]:
        script = self.cluster.script(program)
        size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
        command = ["--mpi", *words, "-np", str(size), "-H", hosts, "python", script]
        return self.cluster.start(*command, **self.environment, **extra)

    def run(self, program: str, *words: str, **keywords: str) -> subprocess.CompletedProcess[str]:
        return finish(self.cluster, self.start(program, *words, **keywords))


@pytest.fixture(params=mpi_wheels.MPIS)
def mpi(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Mpi]:
    reason = mpi_wheels.obstacle(request.param)
    if reason:
        pytest.skip(reason)
    yield Mpi(cluster, request.param)


def test_a_training_on_two_hosts_has_the_bits_of_one_host(mpi: Mpi, one_host: Outcome) -> None:
    done = mpi.run("import sys; sys.modules['mpi4py'] = None\n" + TRAINING + "train()\n", hosts="hostA:2,hostB:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done.stdout) == [("4 2", one_host.digest, one_host.norm)] * 4


def test_ranks_have_their_ranks_and_the_users_variables_but_not_the_launchers_devices(mpi: Mpi) -> None:
    show = "say('VARIABLES', me.rank, os.environ.get('MINE'), os.environ.get('CUDA_VISIBLE_DEVICES'), os.getcwd())\n"
    done = mpi.run(JOB + SAY_RANKS + show, hosts="hostA:3,hostB:1", MINE="a  b", CUDA_VISIBLE_DEVICES="7")
    assert done.returncode == 0, done.stderr
    expected = ["0 4 0 3 0 2 hostA", "1 4 1 3 0 1 hostA", "2 4 2 3 0 1 hostA", "3 4 0 1 1 2 hostB"]
    assert sorted(re.findall(r"RANK (.*)", done.stdout)) == expected
    folder = mpi.cluster.folder
    variables = [f"{rank} a  b {'None' if rank == 3 else '7'} {folder}" for rank in range(4)]
    assert sorted(re.findall(r"VARIABLES (.*)", done.stdout)) == variables


def test_interfaces_whose_names_differ(mpi: Mpi) -> None:
    done = mpi.run(JOB + SAY_RANKS, "--network-interfaces", ",".join(INTERFACES.values()))
    assert done.returncode == 0, done.stderr
    assert len(re.findall("RANK", done.stdout)) == 2


def test_the_secret_is_in_no_list_of_processes_and_no_file(mpi: Mpi) -> None:
    looked = mpi.cluster.folder / "looked"
    # The ranks run until the test has looked, for a minute at most.
    wait = f"for _ in range(600):\n    if os.path.exists({str(looked)!r}):\n        break\n    time.sleep(0.1)\n"
    process = mpi.start(JOB + "say('ready')\n" + wait)
    mpi.cluster.await_line(process, "ready", times=2)
    (rank,) = mpi.cluster.hosts.find("hostB", "python job.py")
    secret = psutil.Process(rank).environ()["_HOROVOD_SECRET_KEY"]
    assert len(secret) == 44
    seen = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [line for line in seen if secret in line]
    folder = mpi.cluster.folder
    assert not [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    looked.touch()
    assert finish(mpi.cluster, process).returncode == 0


WAITING = JOB + "say('ready')\nwhile True:\n    barrier().wait()\n    time.sleep(0.05)\n"


def test_a_killed_rank_ends_the_job_and_nothing_is_left(mpi: Mpi) -> None:
    process = mpi.start(WAITING)
    mpi.cluster.await_line(process, "ready", times=2)
    os.kill(mpi.cluster.hosts.find("hostB", "python job.py")[-1], signal.SIGKILL)
    done = finish(mpi.cluster, process)
    assert done.returncode not in (0, None)
    assert "horovodrun: the job failed: mpirun ended with exit code" in done.stderr
    mpi.cluster.hosts.await_nothing(10)


@pytest.mark.parametrize("end", ["Ctrl-C", "Ctrl-C twice", "a killed launcher"])
def test_the_launchers_end_is_that_of_both_hosts(mpi: Mpi, end: str) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    process = mpi.start(stubborn + WAITING if end == "Ctrl-C twice" else WAITING)
    mpi.cluster.await_line(process, "ready", times=2)
    launcher = psutil.Process(mpi.cluster.launcher_of(process))
    if end == "a killed launcher":
        launcher.kill()
    else:
        launcher.send_signal(signal.SIGINT)
        if end == "Ctrl-C twice":
            psutil.wait_procs([launcher], timeout=0.6)
            if launcher.is_running():
                launcher.send_signal(signal.SIGINT)
    done = finish(mpi.cluster, process)
    assert done.returncode in {"a killed launcher": (137, -9), "Ctrl-C": (130,)}.get(end, (130, -2))
    mpi.cluster.hosts.await_nothing(10)


def test_a_function_runs_on_both_hosts(mpi: Mpi) -> None:
    call = "horovod.run(socket.gethostname, num_proc=2, hosts='hostA:1,hostB:1', use_mpi=True)"
    config = mpi.cluster.hosts.folder / "ssh_config"
    process = mpi.cluster.start_command(
        "python", "-c", f"import horovod, socket; print('RESULT', {call})",
        HOROVOD_SSH_COMMAND=f"ssh -F {config}", **mpi.environment,
    )  # fmt: skip
    done = finish(mpi.cluster, process)
    assert lines(done.stdout, start="RESULT") == ["RESULT ['hostA', 'hostB']"], done.stderr


def test_a_host_that_cannot_be_reached_is_named(mpi: Mpi) -> None:
    done = mpi.run("pass", hosts="hostA:1,hostB:1,hostD:1")
    assert done.returncode not in (0, None)
    *_, failed, reason = done.stderr.splitlines()
    assert failed.startswith("horovodrun: the job failed: mpirun ended with exit code"), done.stderr
    assert reason.startswith("Host hostD cannot be reached by ssh: its name is unknown: is it spelled correctly?"), (
        done.stderr
    )
