"""What dies in the middle of a job on two hosts: one message names the first failure, and nothing is left on either side."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from cluster.conftest import Cluster
from cluster.hosts import Hosts

LOST_AFTER_SECONDS = 15
"""How long a host may be silent until ssh and the agent give the other side up."""
ENDING_SECONDS = 20
"""What an ending job may take beyond that: the ranks' last words, grace, and a machine that is busy."""

RANK = """
import time, torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="first")
print("ready", flush=True)
for step in range(10**6):
    hvd.allreduce(torch.ones(1000), name=f"step{step % 10}")
    time.sleep(0.02)
"""


@pytest.fixture
def job(cluster: Cluster) -> subprocess.Popen[str]:
    """A job of two ranks on each host, in the middle of its work."""
    (cluster.folder / "job.py").write_text(RANK)
    process = cluster.start("-np", "4", "-H", "hostA:2,hostB:2", "python", "job.py")
    cluster.await_line(process, "ready", times=4)
    return process


def kill(find: Callable[[Hosts], list[int]]) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        victims = find(cluster.hosts)
        assert victims
        os.kill(victims[-1], signal.SIGKILL)

    return act


def ranks(hosts: Hosts) -> list[int]:
    return hosts.find("hostB", "python job.py")


def agent(hosts: Hosts) -> list[int]:
    return [pid for pid in hosts.find("hostB", "agent.program") if "/bin/sh" not in hosts.processes("hostB")[pid]]


def sshd(hosts: Hosts) -> list[int]:
    return hosts.find("hostB", "sshd: root")


def ssh(hosts: Hosts) -> list[int]:
    return hosts.find("hostA", "ssh ")


@pytest.mark.parametrize(
    ("act", "who", "message"),
    [
        (kill(ranks), "(2|3)", "killed by SIGKILL"),
        (kill(agent), "2", "Reason: the agent of hostB is lost: it was killed, or the connection broke"),
        (kill(sshd), "2", "Reason: the agent of hostB is lost: "),
        (kill(ssh), "2", "Reason: the agent of hostB is lost: ssh was killed by SIGKILL"),
    ],
    ids=["a rank", "the agent", "sshd", "ssh"],
)
def test_who_is_killed_is_named_and_all_others_end(
    cluster: Cluster, job: subprocess.Popen[str], act: Callable[[Cluster], None], who: str, message: str
) -> None:
    act(cluster)
    done = cluster.finish(job, ENDING_SECONDS)
    assert done.returncode != 0
    named = re.findall(r"horovodrun: the job failed. Rank (\d) failed first \((\w+), local rank", done.stderr)
    assert len(named) == 1 and named[0][1] == "hostB" and re.fullmatch(who, named[0][0]), done.stderr
    assert message in done.stderr
    cluster.hosts.await_nothing(ENDING_SECONDS)


@pytest.mark.parametrize("side", ["hostA", "hostB"])
def test_a_cable_that_is_pulled_out_ends_the_job_on_both_sides(
    cluster: Cluster, job: subprocess.Popen[str], side: str
) -> None:
    cluster.hosts.link(side, up=False)
    done = cluster.finish(job, LOST_AFTER_SECONDS + ENDING_SECONDS)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("horovodrun: the job failed.")]
    assert "(hostB, local rank" in line, done.stderr
    cluster.hosts.await_nothing(LOST_AFTER_SECONDS + ENDING_SECONDS)


def test_a_killed_launcher_leaves_nothing_on_either_host(cluster: Cluster, job: subprocess.Popen[str]) -> None:
    os.kill(cluster.launcher_of(job), signal.SIGKILL)
    cluster.hosts.await_nothing(ENDING_SECONDS)


def test_a_launcher_that_is_killed_while_the_cable_is_out_leaves_nothing(
    cluster: Cluster, job: subprocess.Popen[str]
) -> None:
    cluster.hosts.link("hostB", up=False)
    os.kill(cluster.launcher_of(job), signal.SIGKILL)
    cluster.hosts.await_nothing(LOST_AFTER_SECONDS + ENDING_SECONDS)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_both_hosts(cluster: Cluster, job: subprocess.Popen[str], times: int) -> None:
    launcher = psutil.Process(cluster.launcher_of(job))
    for _ in range(times):
        if launcher.is_running():
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.4)
    done = cluster.finish(job, ENDING_SECONDS)
    assert done.returncode == 130
    cluster.hosts.await_nothing(ENDING_SECONDS)


def test_a_launcher_that_is_stopped_for_a_while_is_waited_for(cluster: Cluster) -> None:
    process = cluster.start(
        "-np", "1", "-H", "hostB:1", "sh", "-c", f"echo ready; sleep {LOST_AFTER_SECONDS + 5}; echo here"
    )
    cluster.await_line(process, "ready")
    launcher = cluster.launcher_of(process)
    os.kill(launcher, signal.SIGSTOP)
    time.sleep(LOST_AFTER_SECONDS + 3)
    for stopped in (launcher, process.pid):  # who entered the host has stopped as well
        os.kill(stopped, signal.SIGCONT)
    done = cluster.finish(process)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n")
