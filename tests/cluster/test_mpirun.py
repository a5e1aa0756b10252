"""``mpirun`` alone, without horovodrun, on two hosts: the ranks find each other, train as on one host, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import mpi_wheels as mpi
from cluster.conftest import Cluster
from cluster.hosts import ADDRESSES
from cluster.training import TRAINING, Outcome, outcomes
from part import some
from time_limits import SOON
from torch_versions import GLOO

PATIENCE_SECONDS = SOON
WITHOUT_RANKS_SECONDS = 15
"""Longer than a launcher takes to start the first rank, or to end after the last one, on a busy machine."""
NO_MPI4PY = "import sys; sys.modules['mpi4py'] = None\n"
MPI_FIRST = "from mpi4py import MPI\n"
SAY_RANKS = r"""
import os, numpy, plain
from horovod.common import basics
for _ in range(2):
    plain.init()
    (total,) = plain.allreduce(numpy.ones(1, numpy.float32), "total")
    numbers = basics.rank(), basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size()
    os.write(1, f"RANK {numbers} {total}\n".encode())  # at once: mpirun mixes the parts of lines
    plain.shutdown()
"""


def start(cluster: Cluster, kind: str, hosts: str, *command: str | Path, engine: str = "") -> subprocess.Popen[str]:
    """``mpirun`` on hostA, with one rank for each slot of ``hosts``.

    Args:
        command: perhaps flags of ``mpirun`` before it.
        engine: that is forced.
    """
    reason = mpi.obstacle(kind)
    if reason:
        pytest.skip(reason)
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    config = cluster.hosts.folder / "ssh_config"
    variables = mpi.environment(kind) | {"HOROVOD_CPU_OPERATIONS": engine}
    ssh = f"-F {config} -o StrictHostKeyChecking=accept-new"
    if kind == mpi.OPEN_MPI:
        words = ["-H", hosts, "--bind-to", "none", "--prtemca", "plm_ssh_agent", f"ssh {ssh}"]
        for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "HOROVOD_CPU_OPERATIONS"):
            words += ["-x", name]
    else:
        words = ["-launcher", "ssh", "-hosts", hosts]
        variables["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh
    mpirun = mpi.prefix(kind) / "bin" / "mpirun"
    return cluster.start_command(mpirun, *words, "-np", str(size), *command, **variables)


def finish(cluster: Cluster, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """A job that ``mpirun`` has started, to its end.

    When a rank has failed and all have ended, Open MPI's ``mpirun`` may wait without end, as its daemons do
    (https://github.com/openpmix/prrte/issues/1839). That is not what a test is about: they are killed then.
    """
    seconds_without_ranks = 0
    for _ in range(int(PATIENCE_SECONDS)):
        with suppress(subprocess.TimeoutExpired):
            return cluster.finish(process, 1)
        seconds_without_ranks = 0 if cluster.hosts.left("python ") else seconds_without_ranks + 1
        if seconds_without_ranks == WITHOUT_RANKS_SECONDS:
            for name in ADDRESSES:
                for pid in cluster.hosts.find(name, "/bin/prte"):
                    with suppress(ProcessLookupError):  # it has ended with another
                        os.kill(pid, signal.SIGKILL)
    return cluster.finish(process, 1)


def lines(text: str, *, start: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize(
    ("kind", "first", "engines"),
    [(mpi.MPICH, NO_MPI4PY, ["", *GLOO]), (mpi.MPICH, MPI_FIRST, ["", "mpi"]), (mpi.OPEN_MPI, "", ["", "mpi"])],
    ids=["MPICH without mpi4py", "MPICH", "Open MPI"],
)
def test_a_training_on_two_hosts_has_the_bits_of_one_host(
    cluster: Cluster, one_host: Outcome, kind: str, first: str, engines: list[str]
) -> None:
    """With the engine that is chosen, and in the same job again with MPI or Gloo carrying the data."""
    calls = "".join(f"os.environ['HOROVOD_CPU_OPERATIONS'] = {engine!r}\ntrain()\n" for engine in engines)
    script = cluster.script(first + TRAINING + calls)
    two = finish(cluster, start(cluster, kind, "hostA:2,hostB:2", "python", script))
    assert two.returncode == 0, two.stdout + two.stderr
    assert outcomes(two.stdout) == [("4 2", one_host.digest, one_host.norm)] * 4 * len(engines)


@pytest.mark.parametrize("kind", mpi.MPIS)
def test_hosts_with_different_numbers_of_ranks(cluster: Cluster, kind: str) -> None:
    cluster.script(SAY_RANKS)
    done = finish(cluster, start(cluster, kind, "hostA:3,hostB:1", "python", "job.py"))
    expected = [
        f"RANK {numbers} 4.0" for numbers in [(0, 0, 3, 0, 2), (1, 1, 3, 0, 1), (2, 2, 3, 0, 1), (3, 0, 1, 1, 2)]
    ]
    assert lines(done.stdout, start="RANK") == sorted(expected * 2), done.stderr


def test_a_network_that_leads_nowhere_is_left_out_under_mpirun(cluster: Cluster) -> None:
    """Without MPI itself, which would try that network and hang."""
    cluster.script(NO_MPI4PY + SAY_RANKS)
    with cluster.hosts.broken_second_network():
        done = finish(cluster, start(cluster, mpi.MPICH, "hostA:1,hostB:1", "python", "job.py"))
    assert len(lines(done.stdout, start="RANK")) == 4, done.stderr
    assert "no rank uses address 10.78.0.1 of hostA: hostB cannot reach it (no answer)" in done.stderr


def test_without_mpi4py_open_mpi_says_what_to_install(cluster: Cluster) -> None:
    cluster.script(NO_MPI4PY + SAY_RANKS)
    done = finish(cluster, start(cluster, mpi.OPEN_MPI, "hostA:1,hostB:1", "python", "job.py"))
    assert done.returncode != 0
    assert "Open MPI started 2 ranks on several hosts and gave them no rendezvous server." in done.stderr
    assert "install mpi4py for the Python of every rank (pip install mpi4py)" in done.stderr


def test_another_mpi_than_the_one_that_started_the_job_is_named(cluster: Cluster) -> None:
    library = mpi.environment(mpi.OPEN_MPI)["MPI4PY_LIBMPI"]
    lead = f"import os; os.environ['MPI4PY_LIBMPI'] = {library!r}\n{MPI_FIRST}"
    cluster.script(lead + SAY_RANKS)
    done = finish(cluster, start(cluster, mpi.MPICH, "hostA:1,hostB:1", "python", "job.py"))
    assert done.returncode != 0
    assert "MPICH started 2 ranks, but the MPI library of mpi4py (Open MPI v5" in done.stderr


def test_a_rank_that_raises_under_open_mpi_ends_the_job_although_others_are_busy(cluster: Cluster) -> None:
    script = cluster.folder / "job.py"
    script.write_text(
        "import time\nfrom horovod.common import basics\nbasics.init()\n"
        "if basics.rank() == 0:\n    raise ValueError('out of luck')\ntime.sleep(1000)\n"
    )
    done = finish(cluster, start(cluster, mpi.OPEN_MPI, "hostA:1,hostB:1", "python", script))
    assert done.returncode != 0 and "ValueError: out of luck" in done.stderr
    cluster.hosts.await_nothing(10)


@pytest.mark.parametrize("kind", mpi.MPIS)
def test_a_killed_rank_ends_the_job_on_both_hosts(cluster: Cluster, kind: str) -> None:
    script = cluster.script(
        "import time, numpy, plain\nplain.init()\nprint('ready', flush=True)\n"
        "while True:\n    plain.allreduce(numpy.ones(9, numpy.float32), 'x')\n    time.sleep(0.01)\n"
    )
    process = start(cluster, kind, "hostA:2,hostB:2", "python", script)
    cluster.await_line(process, "ready", times=4)
    os.kill(cluster.hosts.find("hostB", f"python {script}")[-1], signal.SIGKILL)
    assert finish(cluster, process).returncode != 0
    cluster.hosts.await_nothing(10)


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(cluster: Cluster) -> None:
    """The ranks find each other over MPI, whose own start waits for all ranks without end."""
    script = cluster.script(
        "import os, time\nfrom horovod.common import basics\nos.environ['HOROVOD_START_TIMEOUT'] = '3'\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "time.sleep(60 * (rank == 2))  # mpirun ends it sooner\n"
        "basics.init()\n"
    )
    done = finish(cluster, start(cluster, mpi.OPEN_MPI, "hostA:2,hostB:1", "python", script))
    assert done.returncode != 0
    assert (
        "TimeoutError: not all 3 ranks that Open MPI started called hvd.init(), in which MPI starts, within 3 seconds"
        in (done.stderr)
    )
    cluster.hosts.await_nothing(10)


LENIENT = {mpi.MPICH: ["-disable-auto-cleanup"], mpi.OPEN_MPI: ["--runtime-options", "continuous,recoverable"]}
"""What has ``mpirun`` leave the other ranks alone when one has ended with an error."""
COME = "os.dup2(os.open(f'errors-{rank}', os.O_CREAT | os.O_WRONLY), 2)\n"
"""What a rank says from now on goes to a file: ``mpirun`` may lose the last words of a rank."""


def finish_leniently(cluster: Cluster, kind: str, *command: str | Path) -> tuple[int, str]:
    """Four ranks on two hosts to their end, each of which does COME before one ends: the launcher's exit status, and what they
    said."""
    done = finish(cluster, start(cluster, kind, "hostA:2,hostB:2", *LENIENT[kind], *command, engine="mpi"))
    files = [cluster.folder / f"errors-{rank}" for rank in range(4)]
    assert all(file.exists() for file in files), done.stdout + done.stderr
    return done.returncode, "".join(file.read_text() for file in files) + done.stderr


@pytest.mark.parametrize(("lost", "late"), some([(0, 0), (0, 2), (2, 0), (3, 0)], [(0, 2), (3, 0)]))
@pytest.mark.parametrize("kind", mpi.MPIS)
def test_a_rank_that_dies_after_all_have_left_does_not_keep_those_on_the_other_host(
    cluster: Cluster, kind: str, lost: int, late: int
) -> None:
    """They wait for it before ``Finalize``, and their launcher does not end them. Open MPI ends by itself where it sees a
    connection between hosts closed; MPICH waits on, and if they come ``late`` seconds later, in a call that may not return."""
    script = cluster.script(
        "import os, time, numpy, plain\nfrom horovod.common import basics\n"
        f"plain.init()\nrank = basics.rank()\n{COME}"
        "plain.allreduce(numpy.ones(9, numpy.float32), 'x')\nplain.shutdown()\n"
        f"if rank == {lost}:\n    os._exit(3)  # it dies: no exit handler, and none of MPI's, runs\ntime.sleep({late})\n"
    )
    status, said = finish_leniently(cluster, kind, "python", script)
    assert status and "Segmentation" not in said
    if kind == mpi.MPICH:
        assert said.count("MPI is not finalized") == 3, said
    cluster.hosts.await_nothing(10)


@pytest.mark.parametrize("kind", mpi.MPIS)
def test_a_rank_that_ends_before_others_send_to_it_does_not_keep_them(cluster: Cluster, kind: str) -> None:
    """Their launcher does not end them."""
    script = cluster.script(
        "import os, time, numpy, plain\nos.environ['HOROVOD_GLOO_TIMEOUT_SECONDS'] = '3'\nplain.init()\n"
        "from horovod.common import basics\nfrom horovod.comm.mpi.exchange import MpiExchange\n"
        f"rank, send = basics.rank(), MpiExchange.send\n{COME}"
        "def late(exchange, peer, *data):\n    if step == 20:\n"
        "        os._exit(3) if rank == 2 else time.sleep(0.3)\n    return send(exchange, peer, *data)\n"
        "MpiExchange.send = late\n"
        "for step in range(22):\n    plain.allreduce(numpy.ones(9, numpy.float32), 'x')\n"
    )
    status, said = finish_leniently(cluster, kind, "python", script)
    assert status and "Segmentation" not in said
    if kind == mpi.MPICH:  # the other launcher may end them all the same
        assert said.count("RankLostError: Horovod: rank 2 ") == 3, said
    cluster.hosts.await_nothing(10)
