"""Ranks on two hosts over a real ssh: they train as on one host, see each other's hosts, and keep their secret."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from cluster.conftest import Cluster
from cluster.hosts import ADDRESSES, INTERFACES, Hosts
from cluster.training import PYTORCH, TRAINING, Outcome, outcomes
from horovod.control.secret import decode_secret
from ranks import RankPool
from time_limits import SOON
from torch_versions import GLOO


def results(text: str) -> list[str]:
    return [line.partition(":")[2] for line in text.splitlines()]


ENGINES = ("tcp", *GLOO)
KINDS = [*((engine, how) for how in ("all ranks at once", "in steps") for engine in ENGINES), ("tcp", "of PyTorch")]


@pytest.fixture(scope="module")
def trainings(shared_cluster: Cluster) -> dict[tuple[str, str], list[Outcome]]:
    """What trainings on two hosts come to, on every rank. They follow each other in one job, since imports take longest."""
    program = TRAINING + PYTORCH
    for engine, how in KINDS:
        steps = "01"[how == "in steps"]
        settings = {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_HIERARCHICAL_ALLREDUCE": steps}
        settings["HOROVOD_RELAY_THRESHOLD"] = "0"  # rank 2 speaks for rank 3
        program += f"os.environ.update({settings})\n{'train_pytorch' if how == 'of PyTorch' else 'train'}()\n"
    script = shared_cluster.script(program)
    done = shared_cluster.run("-np", "4", "-H", "hostA:2,hostB:2", "python", script)
    assert done.returncode == 0, done.stderr
    by_rank = [outcomes("\n".join(re.findall(rf"^\[{rank}\].*", done.stdout, re.M))) for rank in range(4)]
    return {kind: list(found) for kind, found in zip(KINDS, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_on_two_hosts_has_the_bits_of_one_host(
    trainings: dict[tuple[str, str], list[Outcome]], one_host: Outcome, engine: str
) -> None:
    assert trainings[engine, "all ranks at once"] == [("4 2", one_host.digest, one_host.norm)] * 4


@pytest.mark.parametrize("between", ENGINES)
def test_a_training_in_steps_comes_to_the_same_but_for_rounding(
    trainings: dict[tuple[str, str], list[Outcome]], one_host: Outcome, between: str
) -> None:
    (found,) = set(trainings[between, "in steps"])
    assert found.sizes == "4 2"
    assert found.norm == pytest.approx(one_host.norm, rel=1e-5)


def test_a_training_of_pytorch_on_two_hosts_has_the_bits_of_one_host(
    trainings: dict[tuple[str, str], list[Outcome]], ranks: Callable[..., RankPool]
) -> None:
    def train(program: str) -> None:
        exec(program, {})

    pool = ranks(4, framework="torch")
    pool.run(train, PYTORCH + "train_pytorch()")
    (one,) = {outcome for rank in range(4) for outcome in outcomes(pool.output(rank))}
    assert one.sizes == "4 1"
    assert trainings["tcp", "of PyTorch"] == [("4 2", one.digest, one.norm)] * 4


def test_hosts_that_the_launcher_is_not_on_can_be_a_job(cluster: Cluster) -> None:
    done = cluster.run("-np", "2", "-H", "hostB:2", "sh", "-c", "echo $(hostname) $HOROVOD_HOSTNAME")
    assert (done.returncode, results(done.stdout)) == (0, ["hostB hostB"] * 2)


def test_a_hostfile_and_users_name_the_hosts(cluster: Cluster) -> None:
    (cluster.folder / "hosts").write_text("root@hostB slots=1\nhostA slots=1\n")
    done = cluster.run("-np", "2", "--hostfile", "hosts", "sh", "-c", "echo $HOROVOD_RANK $(hostname)")
    assert sorted(results(done.stdout)) == ["0 hostB", "1 hostA"], done.stderr


def test_interfaces_can_be_forced_though_their_names_differ(cluster: Cluster) -> None:
    script = cluster.script("import os, plain; plain.init(); print(os.environ['HOROVOD_GLOO_IFACE'], plain.size())")
    names = ",".join(INTERFACES.values())
    done = cluster.run("--network-interfaces", names, "-np", "2", "-H", "hostA:1,hostB:1", "python", script)
    assert done.returncode == 0, done.stderr
    assert sorted(results(done.stdout)) == [f"{INTERFACES[name]} 2" for name in ("hostA", "hostB")]


def test_a_function_returns_the_results_of_all_hosts_in_the_order_of_ranks(cluster: Cluster) -> None:
    program = (
        "import horovod, os, socket; print(horovod.run(lambda: (os.environ['HOROVOD_RANK'], socket.gethostname()), "
        "num_proc=4, hosts='hostC:1,hostA:1,hostB:2'))"
    )
    command = f"ssh -F {cluster.hosts.folder / 'ssh_config'}"
    environment = cluster.launcher.environment(HOROVOD_SSH_COMMAND=command)
    done = subprocess.run(
        cluster.hosts.on("hostA", sys.executable, "-c", program, folder=cluster.folder),
        env=environment, capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.stdout == "[('0', 'hostC'), ('1', 'hostA'), ('2', 'hostB'), ('3', 'hostB')]\n", done.stderr


def test_the_secret_is_in_no_list_of_processes_and_no_file(cluster: Cluster) -> None:
    """What ``ps`` shows on either side, from the first moment of the job to its last."""
    shown: set[str] = set()
    process = cluster.start(
        "-np", "2", "-H", "hostA:1,hostB:1", "sh", "-c", "echo ready; sleep 1.5; echo $_HOROVOD_SECRET_KEY"
    )
    while process.poll() is None:
        for name in ("hostA", "hostB"):
            shown.add(
                subprocess.run(
                    cluster.hosts.on(name, "ps", "axww", "-o", "args"), capture_output=True, text=True
                ).stdout
            )
    done = cluster.finish(process)
    (secret,) = set(results(done.stdout)) - {"ready"}
    everything = "".join(shown)
    assert "horovod-agent" in everything and "horovod.runner.launch" in everything and "sleep 1.5" in everything
    assert len(secret) == 44 and secret not in everything and decode_secret(secret).hex() not in everything
    assert not [path for path in cluster.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


MEETINGS = """
import time, numpy, plain
print("ready", flush=True)
more = 1.0
until = time.monotonic() + 4
number = 0
while more:
    if number % 2 == int(os.environ["HOROVOD_RANK"]):
        time.sleep(0.05)  # the other rank listens meanwhile
    plain.init()
    for step in range(10):
        found = plain.allreduce(numpy.arange(1000 * step + 1, dtype=numpy.float32), f"step{step}")
        assert (found == 2 * numpy.arange(found.size)).all()
    more = plain.allreduce(numpy.full(1, plain.rank() == 0 and time.monotonic() < until, numpy.float32), "more")[0]
    plain.shutdown()
    number += 1
print(number, flush=True)
"""

BOTHER = """
import random, socket, sys
dice, visits = random.Random(1), 0
print("here", flush=True)
while True:
    lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    for port in {int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"} - {22}:
        try:
            with socket.create_connection((sys.argv[1], port), 1) as stranger:
                visits += 1
                stranger.sendall(dice.choice([b"", bytes(5000), b"GET / HTTP/1.1\\r\\n\\r\\n", b"HVD2" + dice.randbytes(100),
                                              b"\\xff" * 5000, bytes(32) + b"\\x04\\x00" + bytes(2000)]))
                stranger.settimeout(dice.choice([0.001, 0.05]))
                stranger.recv(100)
        except OSError:
            pass
    print(visits, flush=True)
"""
"""Visits all ports of its own host at which anything listens, beside sshd."""


def test_hostile_bytes_at_every_port_do_not_disturb_the_job(cluster: Cluster, hosts: Hosts) -> None:
    """The launcher's rendezvous server always listens, ranks whenever they meet, agents never."""
    strangers = {
        name: subprocess.Popen(
            hosts.on(name, sys.executable, "-S", "-c", BOTHER, ADDRESSES[name]), stdout=subprocess.PIPE, text=True
        )
        for name in ("hostA", "hostB")
    }
    try:
        process = cluster.start("-np", "2", "-H", "hostA:1,hostB:1", "python", cluster.script("import os" + MEETINGS))
        cluster.await_line(process, "ready", times=2)
        assert [hosts.listening(name) == [] for name in ("hostA", "hostC")] == [False, True]
        done = cluster.finish(process)
    finally:
        for name in strangers:
            for pid in hosts.find(name, "/proc/net/tcp"):
                psutil.Process(pid).kill()
    visits = [int(stranger.communicate()[0].split()[-1]) for stranger in strangers.values()]
    assert done.returncode == 0, done.stderr
    assert len(set(results(done.stdout))) == 1 and min(visits) > 0
