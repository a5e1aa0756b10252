"""Ranks on two hosts over a real ssh: they train as on one host, see each other's places, and keep their secret."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from cluster.conftest import Cluster
from cluster.hosts import INTERFACES, Hosts

TRAINING = """
import hashlib, torch, horovod.torch as hvd
hvd.init()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
generator = torch.Generator().manual_seed(hvd.rank())
for _ in range({steps}):
    optimizer.zero_grad()
    x = torch.randn(8, 6, generator=generator)
    model(x).square().mean().backward()
    optimizer.step()
text = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(hvd.size(), hvd.cross_size(), hashlib.sha256(text).hexdigest(), flush=True)
"""


def results(text: str) -> list[str]:
    return [line.partition(":")[2] for line in text.splitlines()]


def test_a_training_on_two_hosts_has_the_bits_of_one_host(cluster: Cluster) -> None:
    script = cluster.folder / "train.py"
    script.write_text(TRAINING.format(steps=20))
    flat = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}  # in steps, what the hosts contribute is added host by host
    two = cluster.run("-np", "4", "-H", "hostA:2,hostB:2", "python", script, **flat)
    one = cluster.run("-np", "4", "python", script)
    assert (two.returncode, one.returncode) == (0, 0), two.stderr + one.stderr
    (there,), (here,) = set(results(two.stdout)), set(results(one.stdout))
    assert there.split()[:2] == ["4", "2"] and here.split()[:2] == ["4", "1"]
    assert there.split()[2] == here.split()[2]


def test_hosts_that_the_launcher_is_not_on_can_be_a_job(cluster: Cluster) -> None:
    done = cluster.run("-np", "2", "-H", "hostB:2", "sh", "-c", "echo $(hostname) $HOROVOD_HOSTNAME")
    assert (done.returncode, results(done.stdout)) == (0, ["hostB hostB"] * 2)


def test_a_hostfile_and_users_name_the_hosts(cluster: Cluster) -> None:
    (cluster.folder / "hosts").write_text("root@hostB slots=1\nhostA slots=1\n")
    done = cluster.run("-np", "2", "--hostfile", "hosts", "sh", "-c", "echo $HOROVOD_RANK $(hostname)")
    assert sorted(results(done.stdout)) == ["0 hostB", "1 hostA"], done.stderr


def test_interfaces_can_be_forced_though_their_names_differ(cluster: Cluster) -> None:
    script = cluster.folder / "train.py"
    script.write_text("import os; print(os.environ['HOROVOD_GLOO_IFACE'])\n" + TRAINING.format(steps=1))
    names = ",".join(INTERFACES.values())
    done = cluster.run("--network-interfaces", names, "-np", "2", "-H", "hostA:1,hostB:1", "python", script)
    assert done.returncode == 0, done.stderr
    assert sorted(results(done.stdout))[-2:] == sorted(INTERFACES.values())


def test_a_function_runs_on_both_hosts(cluster: Cluster) -> None:
    program = (
        "import horovod, socket; print(horovod.run(lambda: socket.gethostname(), num_proc=2, hosts='hostA:1,hostB:1'))"
    )
    command = f"ssh -F {cluster.hosts.folder / 'ssh_config'}"
    environment = cluster._launcher.environment(HOROVOD_SSH_COMMAND=command)
    done = subprocess.run(
        cluster.hosts.on("hostA", sys.executable, "-c", program, folder=cluster.folder),
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "['hostA', 'hostB']\n", done.stderr


def test_the_secret_is_in_no_list_of_processes_and_no_file(cluster: Cluster) -> None:
    process = cluster.start("-np", "2", "-H", "hostA:1,hostB:1", "sh", "-c", "echo ready; sleep 3")
    cluster.await_line(process, "ready", times=2)
    (rank, *_) = cluster.hosts.find("hostB", "sleep 3")
    secret = psutil.Process(rank).environ()["_HOROVOD_SECRET_KEY"]
    assert len(secret) == 44
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert any("horovod-agent" in line or "agent.program" in line for line in lines)
    assert not [line for line in lines if secret in line]
    assert not [path for path in cluster.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert cluster.finish(process).returncode == 0


@pytest.mark.parametrize(
    ("words", "ssh", "host", "message"),
    [
        (["-i", "{folder}/other_id"], "", "hostB", "it does not accept the key"),
        ([], "", "hostC", "its name is unknown: is it written right? (ssh: Could not resolve hostname hostc"),
        ([], "", "10.99.0.1", "there is no route to it"),
        ([], "", "10.77.0.9", "there is no route to it"),
        (["-p", "2222"], "", "hostB", "nothing listens at its ssh port"),
        ([], "-o StrictHostKeyChecking=yes -o UserKnownHostsFile=/dev/null", "hostB", "its host key is not trusted"),
    ],
)
def test_a_host_that_cannot_be_reached_says_why(
    cluster: Cluster, words: list[str], ssh: str, host: str, message: str
) -> None:
    words = [word.format(folder=cluster.hosts.folder) for word in words]
    config = "keyless_config" if "-i" in words else "ssh_config"
    done = cluster.run(*words, "-np", "2", "-H", f"hostA:1,{host}:1", "touch", "started", ssh=ssh, config=config)
    assert done.returncode == 1
    assert "1 of 2 hosts cannot take part in this job" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"  {host} ")]
    assert message in line
    assert not (cluster.folder / "started").exists()


BOTHER = """
import random, socket, sys
dice = random.Random(1)
for _ in range(40):
    for port in map(int, sys.argv[2:]):
        try:
            with socket.create_connection((sys.argv[1], port), 1) as stranger:
                stranger.sendall(dice.choice([b"", bytes(5000), b"GET / HTTP/1.1\\r\\n\\r\\n", b"HVD1" + dice.randbytes(100),
                                              b"\\xff" * 5000]))
                stranger.settimeout(0.05)
                stranger.recv(100)
        except OSError:
            pass
"""


def test_hostile_bytes_at_every_port_disturb_nobody(cluster: Cluster, hosts: Hosts) -> None:
    script = cluster.folder / "train.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(1)\n" + TRAINING.format(steps=300))
    process = cluster.start("-np", "2", "-H", "hostA:1,hostB:1", "python", script)
    cluster.await_line(process, "ready", times=2)
    visited = 0
    while process.poll() is None:
        for name in ("hostA", "hostB"):
            ports = [str(port) for _, port in hosts.listening(name)]
            other = "hostB" if name == "hostA" else "hostA"
            address = hosts.listening(name)[0][0] if ports else ""
            if ports:
                visited += len(ports)
                subprocess.run(hosts.on(other, sys.executable, "-S", "-c", BOTHER, address, *ports), check=True)
    done = cluster.finish(process)
    assert done.returncode == 0, done.stderr
    assert visited and len(set(results(done.stdout))) == 1
