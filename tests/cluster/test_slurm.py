"""A real Slurm of two nodes: ranks of srun find one another, horovodrun needs no ssh, and nothing outlives a job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import elastic
from cluster import hosts as namespaces
from cluster import slurm as daemons
from cluster.conftest import write
from cluster.hosts import LIMIT_SECONDS, Hosts, without_blanks
from cluster.slurm import Slurm
from cluster.training import TRAINING, Outcome, outcomes
from launcher.harness import Launcher, last_words
from time_limits import SOON

ENDING_SECONDS = SOON
"""What an ending job may take: last words, grace, Slurm's KillWait of 5 seconds, and a machine that is busy."""

RANK = """
import os, sys, time
from horovod.core.submission import collectives
from horovod.common import basics
from horovod.core.lifecycle import context
basics.init()
collectives.barrier().wait()
me = context.current().identity
node = os.environ["SLURMD_NODENAME"]
numbers = me.rank, me.size, me.local_rank, me.local_size, me.cross_rank, me.cross_size
sys.stdout.write(f"rank {node} {os.environ['SLURM_JOB_ID']} {' '.join(map(str, numbers))}\\n")
sys.stdout.flush()
for step in range(int(sys.argv[1])):
    collectives.barrier().wait()
    time.sleep(0.02)
basics.shutdown()
"""
FOR_LONG = "100000"
LINE = re.compile(r"rank (\w+) (\d+) (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)$", re.MULTILINE)


class Nodes:
    """Starts programs on hostA, which is node n1, in the test's folder."""

    def __init__(self, slurm: Slurm, launcher: Launcher) -> None:
        self.slurm = slurm
        self.folder = launcher.folder
        self.launcher = launcher
        (self.folder / "rank.py").write_text(RANK)

    def start(self, *command: str | Path, **extra: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.slurm.hosts.on("hostA", *command, folder=self.folder),
            env=self.launcher.environment(**self.slurm.environment, **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launcher.started.append(process)
        return process

    def run(self, *command: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*command, **extra))

    def horovodrun(self, *words: str, tasks: int = 2) -> list[str]:
        """The words that start a launcher in an allocation of two nodes."""
        allocate = ["salloc", "--quiet", "-N2", f"--ntasks-per-node={tasks}"]
        return [*allocate, sys.executable, "-m", "horovod.runner.launch", *words]

    def await_ranks(self, process: subprocess.Popen[str], number: int) -> None:
        self.launcher.await_line(process, "rank ", times=number)

    def cancel(self) -> None:
        """Cancel the one job that runs."""
        (job,) = self.slurm.run("hostA", "squeue", "-h", "-o", "%i").split()
        self.slurm.run("hostA", "scancel", job)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = namespaces.obstacle() or daemons.obstacle()
    if reason:
        pytest.skip(reason)
    with without_blanks(tmp_path_factory.mktemp("slurm")) as folder:
        hosts = Hosts(folder)
        try:
            hosts.start()
            made = Slurm(hosts)
            made.start()
            yield made
        finally:
            hosts.close()


@pytest.fixture
def nodes(slurm: Slurm, tmp_path: Path) -> Iterator[Nodes]:
    launcher = Launcher(tmp_path)
    try:
        yield Nodes(slurm, launcher)
        slurm.await_nothing(ENDING_SECONDS)
    finally:
        slurm.run("hostA", "scancel", "--quiet", "--user=root")
        for pid in slurm.processes():
            psutil.Process(pid).kill()
        for process in launcher.started:
            process.communicate(timeout=LIMIT_SECONDS)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ranks(text: str) -> dict[int, tuple[str, int, int, int, int, int]]:
    """What the ranks have said: node, size, local rank, local size, cross rank and cross size by rank."""
    found = {}
    for node, _, *numbers in LINE.findall(text):
        rank, *rest = map(int, numbers)
        assert rank not in found
        found[rank] = (node, *rest)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n4", "--ntasks-per-node=2"], ["n1", "n1", "n2", "n2"]),
        (["-n4", "--ntasks-per-node=2", "-m", "cyclic"], ["n1", "n2", "n1", "n2"]),
        (["-n4", "-m", "arbitrary"], ["n2", "n2", "n2", "n1"]),  # three and one, and the first on the second node
    ],
    ids=["blocks", "cyclic", "a file"],
)
def test_ranks_of_srun_find_one_another_wherever_they_are(nodes: Nodes, words: list[str], expected: list[str]) -> None:
    extra = {}
    if "arbitrary" in words:
        (nodes.folder / "numbers").write_text("\n".join(expected) + "\n")
        extra["SLURM_HOSTFILE"] = str(nodes.folder / "numbers")
    done = nodes.run("srun", "-N2", *words, "python", "rank.py", "1", **extra)
    assert done.returncode == 0, done.stderr
    found = ranks(done.stdout)
    assert [found[rank][0] for rank in range(4)] == expected
    on, met = Counter(expected), Counter[str]()
    for rank, node in enumerate(expected):
        peers = [each for each in ("n1", "n2") if on[each] > met[node]]
        assert found[rank] == (node, 4, met[node], on[node], peers.index(node), len(peers))
        met[node] += 1


def test_steps_side_by_side_and_one_after_the_other_are_jobs_of_their_own(nodes: Nodes) -> None:
    step = "srun --overlap python rank.py 5"
    script = f"{step} -n3 & srun --overlap -n3 python rank.py 5; wait; echo next; {step}"
    done = nodes.run("salloc", "--quiet", "-N2", "-n4", "--ntasks-per-node=2", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    first, _, second = done.stdout.partition("next\n")
    assert sorted(line.split()[4] for line in first.splitlines()) == ["3"] * 3 + ["4"] * 4
    assert sorted(ranks(second)) == [0, 1, 2, 3]


def test_a_secret_in_the_environment_replaces_munge(nodes: Nodes) -> None:
    without = "from horovod.control.rendezvous import munge; munge._LIBRARY = 'libmunge.so.none'"
    (nodes.folder / "without.py").write_text(f"{without}\n{RANK}")
    srun = ("srun", "-N2", "--ntasks-per-node=1", "python", "without.py", "1")
    done = nodes.run(*srun, HOROVOD_SECRET_KEY="any text that nobody can guess")
    assert (done.returncode, sorted(ranks(done.stdout))) == (0, [0, 1]), done.stderr
    told = nodes.run(*srun)
    assert told.returncode and "export HOROVOD_SECRET_KEY=" in told.stderr


def test_a_training_by_srun_has_the_bits_of_one_host(nodes: Nodes, one_host: Outcome) -> None:
    script = write(nodes.folder, TRAINING + "train()\n")
    done = nodes.run("srun", "-N2", "--ntasks-per-node=2", "python", script)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout) == [("4 2", one_host.digest, one_host.norm)] * 4


def test_a_network_that_leads_nowhere_is_left_out_under_srun(nodes: Nodes) -> None:
    with nodes.slurm.hosts.broken_second_network():
        done = nodes.run("srun", "-N2", "--ntasks-per-node=1", "python", "rank.py", "1")
    assert (done.returncode, sorted(ranks(done.stdout))) == (0, [0, 1]), done.stderr
    assert re.search(r"no rank uses address 10\.78\.0\.1 of \w+: \w+ cannot reach it \(no answer\)", done.stderr)


EAVESDROP = """
import os, socket, sys
sys.path.append(sys.argv[3])
from horovod.control.rendezvous.munge import Munge, MungeError
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as server:
    preface = server.recv(6)
    credential = server.recv(int.from_bytes(preface[4:], "big"))
assert preface[:4] == b"HVDS" and credential.startswith(b"MUNGE:"), preface
os.setgid(65534); os.setuid(65534)
try:
    print("read", Munge().open(credential))
except MungeError as error:
    print("refused:", error)
"""


def test_another_user_cannot_read_the_secret(nodes: Nodes) -> None:
    late = "[ $SLURM_PROCID = 0 ] || until [ -e go ]; do sleep 0.1; done; exec python rank.py 1"
    process = nodes.start("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", late)
    hosts = nodes.slurm.hosts
    seen: list[tuple[str, int]] = []
    while not seen:
        assert process.poll() is None, process.communicate()
        seen = [(address, port) for address, port in hosts.listening("hostA") if port >= 61000]
    address, port = seen[0]
    source = str(Path(__file__).parents[2] / "src")
    said = nodes.slurm.run("hostB", sys.executable, "-c", EAVESDROP, address, str(port), source)
    assert "refused: Unauthorized credential" in said
    (nodes.folder / "go").touch()
    done = finish(process)
    assert (done.returncode, sorted(ranks(done.stdout))) == (0, [0, 1]), done.stderr


def test_horovodrun_takes_the_allocations_nodes_and_tasks(nodes: Nodes) -> None:
    done = nodes.run(*nodes.horovodrun("python", "rank.py", "1"))
    assert done.returncode == 0, done.stderr
    found = ranks(done.stdout)
    assert found == {
        0: ("n1", 4, 0, 2, 0, 2),
        1: ("n1", 4, 1, 2, 0, 2),
        2: ("n2", 4, 0, 2, 1, 2),
        3: ("n2", 4, 1, 2, 1, 2),
    }


def test_horovodrun_in_a_batch_script_runs_the_first_nodes_ranks_itself(nodes: Nodes) -> None:
    script = nodes.folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -m horovod.runner.launch -np 3 python rank.py 1; echo done $?\n")
    nodes.run("sbatch", "-N2", "--ntasks-per-node=2", "--output=out", script)
    nodes.slurm.await_nothing(LIMIT_SECONDS)
    text = (nodes.folder / "out").read_text()
    assert text.endswith("done 0\n")
    assert {rank: numbers[:2] for rank, numbers in ranks(text).items()} == {0: ("n1", 3), 1: ("n1", 3), 2: ("n2", 3)}


def test_no_command_line_and_no_step_shows_the_secret(nodes: Nodes) -> None:
    process = nodes.start(*nodes.horovodrun("python", "rank.py", FOR_LONG))
    nodes.await_ranks(process, 4)
    (rank, *_) = nodes.slurm.hosts.find("hostB", "python rank.py")
    secret = psutil.Process(rank).environ()["_HOROVOD_SECRET_KEY"]
    assert len(secret) == 44
    for pid, line in nodes.slurm.processes().items():
        assert secret not in line
        if "srun" in line.split(" ")[0]:
            assert secret not in psutil.Process(pid).environ().values()
    assert secret not in nodes.slurm.run("hostA", "scontrol", "--details", "show", "job")
    nodes.cancel()
    finish(process)


@pytest.mark.parametrize("how", ["srun", "salloc", "sbatch"])
def test_a_cancelled_job_says_so_once_and_leaves_nothing(nodes: Nodes, how: str) -> None:
    launch = nodes.horovodrun("python", "rank.py", FOR_LONG)
    if how == "srun":
        process = nodes.start("srun", "-N2", "--ntasks-per-node=2", "python", "rank.py", FOR_LONG)
    elif how == "salloc":
        process = nodes.start(*launch)
    else:
        script = nodes.folder / "job.sh"
        script.write_text(f"#!/bin/sh\nexec {' '.join(launch[4:])}\n")
        nodes.run("sbatch", "-N2", "--ntasks-per-node=2", "--output=out", "--error=err", script)
        (nodes.folder / "out").touch()
        process = nodes.start("tail", "-f", "-n", "+1", "out")
    nodes.await_ranks(process, 4)
    nodes.cancel()
    if how == "sbatch":
        (tail,) = nodes.slurm.hosts.find("hostA", "tail -f")
        os.kill(tail, signal.SIGTERM)
    done = finish(process)
    errors = done.stderr
    if how == "sbatch":
        nodes.slurm.await_nothing(ENDING_SECONDS)
        errors = (nodes.folder / "err").read_text()
    if how == "srun":
        # A rank that Slurm signals a moment later than others may also say that those have gone.
        assert errors.count("CANCELLED AT") == 1
    else:
        assert len(re.findall(r"SIGTERM, as when Slurm's job \d+ is cancelled or reaches its time limit", errors)) == 1
        assert "failed first" not in errors and last_words(errors) == "horovodrun: ended by SIGTERM", errors
    assert done.returncode != 0


def test_a_killed_rank_of_srun_is_named_by_all_others(nodes: Nodes) -> None:
    process = nodes.start("srun", "-N2", "--ntasks-per-node=2", "-l", "python", "rank.py", FOR_LONG)
    nodes.await_ranks(process, 4)
    os.kill(nodes.slurm.hosts.find("hostB", "python rank.py")[-1], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 128 + signal.SIGKILL
    named = re.findall(r"^(\d): .*RankLostError: Horovod: rank (\d) \(host n2, process \d+\) failed", done.stderr, re.M)
    killed = {rank for _, rank in named}
    assert len(killed) == 1 and {teller for teller, _ in named} == set("0123") - killed, done.stderr


@pytest.mark.parametrize(
    ("victim", "message"),
    [("python rank.py", "killed by SIGKILL"), ("agent.program", "Reason: the agent of n2 is lost: ")],
    ids=["a rank", "an agent"],
)
def test_what_is_killed_under_horovodrun_is_named_and_all_others_end(nodes: Nodes, victim: str, message: str) -> None:
    process = nodes.start(*nodes.horovodrun("python", "rank.py", FOR_LONG))
    nodes.await_ranks(process, 4)
    os.kill(nodes.slurm.hosts.find("hostB", victim)[-1], signal.SIGKILL)
    done = finish(process)
    assert done.returncode != 0
    assert re.search(r"the job failed. Rank (2|3) failed first \(n2, local rank", done.stderr), done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(("victim", "left"), [("python elastic.py", 3), ("agent.program", 2)], ids=["a rank", "a node"])
def test_an_elastic_job_goes_on_with_what_is_left_of_its_allocation(nodes: Nodes, victim: str, left: int) -> None:
    (nodes.folder / "elastic.py").write_text(elastic.RANK)
    process = nodes.start(*nodes.horovodrun("--min-np", "2", "python", "elastic.py"))
    nodes.launcher.await_line(process, "trains with 4", times=4)
    os.kill(nodes.slurm.hosts.find("hostB", victim)[-1], signal.SIGKILL)
    nodes.launcher.await_line(process, f"trains with {left}", times=left)
    (nodes.folder / "end").touch()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text())[1] for path in nodes.folder.glob("result.*")]
    assert results == [[4, left]] * left
    assert "No new processes are started on n2." in done.stderr


def test_a_killed_launcher_leaves_nothing_on_either_node(nodes: Nodes) -> None:
    process = nodes.start(*nodes.horovodrun("python", "rank.py", FOR_LONG))
    nodes.await_ranks(process, 4)
    os.kill(nodes.slurm.hosts.find("hostA", "horovod.runner.launch")[-1], signal.SIGKILL)
    finish(process)


def test_a_launcher_that_srun_multiplies_is_refused(nodes: Nodes) -> None:
    done = nodes.run(
        "srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "horovod.runner.launch", "-np", "2", "true"
    )
    assert done.returncode == 2 and "srun has started this launcher 2 times" in done.stderr
