"""What dies in the middle of a job on several hosts, or keeps one from starting: one message names it, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import psutil
import pytest

import horovod
from cluster.conftest import Cluster
from cluster.hosts import Hosts
from horovod._base import version
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until

LOST_AFTER_SECONDS = 15
"""How long a host may be silent until ssh and the agent give the other side up."""
ENDING_SECONDS = SOON
"""What an ending job may take beyond that: the ranks' last words, grace, and a machine that is busy."""

RANK = """
import time, numpy, plain
plain.init()
plain.allreduce(numpy.ones(1, numpy.float32), "first")
print("ready", flush=True)
for step in range(10**6):
    plain.allreduce(numpy.ones(1000, numpy.float32), f"step{step % 10}")
    time.sleep(0.02)
"""


@pytest.fixture
def job(cluster: Cluster) -> subprocess.Popen[str]:
    """A job of two ranks on each host, in the middle of its work."""
    process = cluster.start("-np", "4", "-H", "hostA:2,hostB:2", "python", cluster.script(RANK))
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
    return hosts.agents("hostB")


def sshd(hosts: Hosts) -> list[int]:
    return hosts.find("hostB", "sshd: root")


def ssh(hosts: Hosts) -> list[int]:
    return hosts.find("hostA", "ssh ")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (kill(ranks), "killed by SIGKILL"),
        (kill(agent), "Reason: the agent of hostB is lost: it was killed, or the connection broke"),
        (kill(sshd), "Reason: the agent of hostB is lost: "),
        (kill(ssh), "Reason: the agent of hostB is lost: ssh was killed by SIGKILL"),
    ],
    ids=["a rank", "the agent", "sshd", "ssh"],
)
def test_a_killed_rank_is_named_and_all_others_end(
    cluster: Cluster, job: subprocess.Popen[str], act: Callable[[Cluster], None], message: str
) -> None:
    act(cluster)
    done = cluster.finish(job, ENDING_SECONDS)
    assert done.returncode != 0
    named = re.findall(r"horovodrun: the job failed. Rank (\d) failed first \((\w+), local rank", done.stderr)
    # Which of the host's ranks ends first is left to chance: its agent ends them as soon as it has lost the launcher.
    assert named in ([("2", "hostB")], [("3", "hostB")]), done.stderr
    assert message in done.stderr
    cluster.hosts.await_nothing(ENDING_SECONDS)


def test_a_killed_launcher_leaves_nothing_on_either_host(cluster: Cluster, job: subprocess.Popen[str]) -> None:
    os.kill(cluster.launcher_of(job), signal.SIGKILL)
    cluster.hosts.await_nothing(ENDING_SECONDS)


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


@pytest.mark.parametrize("elastic", [(), ("--min-np", "2")], ids=["fixed", "elastic"])
@pytest.mark.parametrize("act", [kill(ranks), kill(agent)], ids=["a rank", "the agent"])
def test_what_is_killed_on_another_host_after_all_ranks_have_left_fails_the_job(
    cluster: Cluster, elastic: tuple[str, ...], act: Callable[[Cluster], None]
) -> None:
    """No rank watches another one any more. The launcher does until the last has ended, also if the others have ended well."""
    script = cluster.script(
        "import os, time, numpy, plain\nplain.init()\nlate = plain.rank() == 1\n"
        "plain.allreduce(numpy.ones(1, numpy.float32), 'x')\nplain.shutdown()\nprint('left', flush=True)\n"
        "while late:\n    time.sleep(1)\n"
    )
    process = cluster.start("-np", "2", "-H", "hostA:1,hostB:1", *elastic, "python", script)
    cluster.await_line(process, "left", times=2)
    wait_until(lambda: f"python {script}" not in cluster.hosts.processes("hostA").values(), "the end of rank 0")
    act(cluster)
    done = cluster.finish(process, ENDING_SECONDS)
    assert done.returncode not in (None, 0), done.stdout + done.stderr
    assert "hostB" in done.stderr
    cluster.hosts.await_nothing(ENDING_SECONDS)


Stall = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def stall(shared_cluster: Cluster) -> Stall:
    """How four jobs ended, in the middle of which hostB's cable was pulled out. They run at the same time, to save time.

    Launcher and agent are to find it: the ranks, which find it, too, wait far longer than those do.
    """
    cluster, name = shared_cluster, shared_cluster.script(RANK)

    def start(np: int, hosts: str, on: str = "hostA") -> subprocess.Popen[str]:
        words = ("-np", str(np), "-H", hosts, "python", name)
        return cluster.start(*words, on=on, HOROVOD_GLOO_TIMEOUT_SECONDS=str(8 * LOST_AFTER_SECONDS))

    jobs = {
        "cable of a rank's host": start(3, "hostA:1,hostB:2"),
        "cable of the launcher's host": start(2, "hostB:1,hostC:1", on="hostB"),
        "launcher and its cable": start(2, "hostB:1,hostC:1", on="hostB"),
        "launcher that is stopped": cluster.start(
            "-np", "1", "-H", "hostC:1", "sh", "-c", f"echo ready; sleep {LOST_AFTER_SECONDS + 3}; echo here"
        ),
    }
    for job, times in zip(jobs.values(), (3, 2, 2, 1), strict=True):
        cluster.await_line(job, "ready", times)
    cluster.hosts.link("hostB", up=False)
    killed = cluster.launcher_of(jobs["launcher and its cable"])
    os.kill(killed, signal.SIGKILL)
    stopped = cluster.launcher_of(jobs["launcher that is stopped"])
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(LOST_AFTER_SECONDS + 3)
    for process in (stopped, jobs["launcher that is stopped"].pid):  # who entered the host has stopped as well
        os.kill(process, signal.SIGCONT)
    done = {name: cluster.finish(job, ENDING_SECONDS) for name, job in jobs.items()}
    cluster.hosts.await_nothing(ENDING_SECONDS)
    cluster.hosts.mend()
    return done


@pytest.mark.parametrize(
    ("which", "lost"), [("cable of a rank's host", "hostB"), ("cable of the launcher's host", "hostC")]
)
def test_a_cable_that_is_pulled_out_ends_the_job_on_both_sides(stall: Stall, which: str, lost: str) -> None:
    done = stall[which]
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("horovodrun: the job failed.")]
    assert f"({lost}, local rank" in line, done.stderr
    (reason,) = [line for line in done.stderr.splitlines() if line.startswith("Reason: ")]
    assert f"the agent of {lost} is lost: it has not answered for {LOST_AFTER_SECONDS} seconds" in reason, done.stderr
    assert f"horovodrun: {lost} did not confirm that the job has ended there" in done.stderr


def test_a_launcher_whose_host_is_gone_leaves_nothing_on_others(stall: Stall) -> None:
    assert stall["launcher and its cable"].returncode != 0  # that nothing is left, the fixture has seen


def test_a_launcher_that_is_stopped_for_a_while_is_waited_for(stall: Stall) -> None:
    done = stall["launcher that is stopped"]
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n"), done.stderr


# Before anything starts.


@pytest.mark.parametrize(
    ("words", "ssh", "host", "message"),
    [
        (["-i", "{folder}/other_id"], "", "hostB", "it does not accept the key"),
        ([], "", "hostD", "its name is unknown: is it spelled correctly? (ssh: Could not resolve hostname hostd"),
        ([], "", "10.99.0.1", "there is no route to it"),
        ([], "", "10.77.0.9", "there is no route to it"),
        (["-p", "2222"], "", "hostB", "nothing listens at its ssh port"),
        ([], "-o StrictHostKeyChecking=yes -o UserKnownHostsFile=/dev/null", "hostB", "its host key is not trusted"),
    ],
    ids=["wrong key", "unknown name", "no route", "host down", "sshd down", "unknown host key"],
)
def test_a_host_that_cannot_be_reached_says_why(
    cluster: Cluster, words: list[str], ssh: str, host: str, message: str
) -> None:
    words = [word.format(folder=cluster.hosts.folder) for word in words]
    config = "keyless_config" if "-i" in words else "ssh_config"
    assert message in refusal(cluster, cluster.start(*refused(host, *words), ssh=ssh, config=config), host)


def refused(host: str, *words: str) -> list[str]:
    return [*words, "-np", "2", "-H", f"hostA:1,{host}:1", "touch", "started"]


def refusal(cluster: Cluster, process: subprocess.Popen[str], host: str) -> str:
    """The line about a host that cannot take part, because of which nothing has been started."""
    done = cluster.finish(process)
    assert done.returncode == 1
    assert "1 of 2 hosts cannot take part in this job" in done.stderr
    assert not (cluster.folder / "started").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"  {host} ")]
    return line


def test_a_host_that_answers_nothing_says_so_within_the_start_timeout(cluster: Cluster) -> None:
    with cluster.hosts.no_way("hostA", "hostB"):
        line = refusal(cluster, cluster.start(*refused("hostB", "--start-timeout", "4")), "hostB")
    assert "it does not answer: is it switched on, and reachable from here?" in line


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (horovod, "Horovod is not installed for its Python ("),
        (
            msgspec,
            "a package that Horovod needs is not installed there (",
        ),
    ],
    ids=["horovod", "msgspec"],
)
def test_a_host_without_a_package_names_it(cluster: Cluster, package: ModuleType, message: str) -> None:
    missing = cluster.folder / "missing.py"
    missing.write_text(f"raise ModuleNotFoundError(\"No module named '{package.__name__}'\")\n")
    with cluster.hosts.replaced("hostB", Path(str(package.__file__)), missing):
        line = refusal(cluster, cluster.start(*refused("hostB")), "hostB").replace('"', "'")
    assert message in line and f"No module named '{package.__name__}'" in line


def test_a_host_with_another_version_says_so(cluster: Cluster) -> None:
    own = Path(version.__file__)
    other = cluster.folder / "other.py"
    other.write_text(own.read_text() + "\nVERSION = '0.28.1+pure.0'\n")
    with cluster.hosts.replaced("hostB", own, other):
        line = refusal(cluster, cluster.start(*refused("hostB")), "hostB")
    assert "it has version 0.28.1+pure.0 of Horovod" in line and "install the same on both" in line


SAYS_WHY = """
import os, sys, numpy, plain
from pathlib import Path
plain.init()
try:
    for step in range(10**9):
        plain.allreduce(numpy.ones(1000, numpy.float32), f"step{step % 10}")
        if step == 10:
            print("ready", flush=True)
except Exception as error:
    Path(f"{os.environ['HOROVOD_RANK']}.txt").write_text(str(error))
    raise
"""


def test_a_cable_between_hosts_whose_ranks_are_behind_relays_is_told_by_the_ranks_of_both(cluster: Cluster) -> None:
    """Before the launcher finds it: the ranks of a host hear of the other host through their relays."""
    settings = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "6", "HOROVOD_RELAY_THRESHOLD": "0"}
    words = ("-np", "5", "-H", "hostA:1,hostB:4", "python", cluster.script(SAYS_WHY))
    process = cluster.start(*words, **settings)
    cluster.await_line(process, "ready", times=5)
    cluster.hosts.link("hostB", up=False)
    assert cluster.finish(process).returncode != 0
    cluster.hosts.await_nothing(LOST_AFTER_SECONDS + ENDING_SECONDS)
    said = [(cluster.folder / f"{rank}.txt").read_text() for rank in range(5)]
    # Whether the kernel gives the connection up first, or rank 0 its questions, is a matter of moments.
    silent = r"failed: (its host is silent on the connection from \S+ to \S+|it no longer answers: .* is unreachable)"
    assert re.match(rf"Horovod: rank [12] \(host hostB, process \d+\) {silent}", said[0]), said[0]
    for text in said[1:]:
        assert re.match(rf"Horovod: rank 0 \(host hostA, process \d+\) {silent}", text), text
