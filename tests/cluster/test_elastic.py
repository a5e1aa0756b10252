"""An elastic job on several hosts: a host's cable is pulled out, or the launcher's for a while, and training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time

from cluster.conftest import Cluster
from cluster.elastic import RANK

LOST_AFTER_SECONDS = 15
"""How long a host may be silent until its agent is given up."""
WAITING_SECONDS = LOST_AFTER_SECONDS + 30


def results(cluster: Cluster) -> dict[int, list[int]]:
    """The sizes of each process's rounds; all have made the same number of steps."""
    found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in cluster.folder.glob("result.*")}
    assert len({step for step, _ in found.values()}) == 1
    return {number: sizes for number, (_, sizes) in found.items()}


def test_a_host_whose_cable_is_pulled_out_is_left_behind(cluster: Cluster) -> None:
    words = ("-H", "hostA:2,hostB:1", "--min-np", "2", "python", cluster.script(RANK))
    process = cluster.start(*words, HOROVOD_GLOO_TIMEOUT_SECONDS="6")
    cluster.await_line(process, "trains with 3", times=3)
    cluster.hosts.link("hostB", up=False)
    cluster.await_line(process, "trains with 2", times=2)
    (cluster.folder / "end").touch()
    done = cluster.finish(process, WAITING_SECONDS)
    assert done.returncode == 0, done.stderr
    assert results(cluster) == {0: [3, 2], 1: [3, 2]}
    assert "No new processes are started on hostB." in done.stderr
    cluster.hosts.await_nothing(WAITING_SECONDS)  # on hostB, whose agent finds its launcher gone


def test_a_launcher_without_a_network_for_a_while_still_begins_the_next_round(cluster: Cluster) -> None:
    words = ("-H", "hostB:2,hostC:1", "--min-np", "2", "python", cluster.script(RANK))
    process = cluster.start(*words)
    cluster.await_line(process, "trains with 3", times=3)
    cluster.hosts.link("hostA", up=False)
    time.sleep(LOST_AFTER_SECONDS / 3)
    cluster.hosts.link("hostA", up=True)
    (lost,) = cluster.hosts.find("hostC", "python job.py")
    os.kill(lost, signal.SIGKILL)
    cluster.await_line(process, "trains with 2", times=2)
    (cluster.folder / "end").touch()
    done = cluster.finish(process, WAITING_SECONDS)
    assert done.returncode == 0, done.stderr
    assert results(cluster) == {0: [3, 2], 1: [3, 2]}
    (reason,) = re.findall(r"Process 2 \(.*\) exit with status code (.*?)\. ", done.stderr)
    assert reason == "137 (killed by SIGKILL)"


def test_a_host_whose_agent_gets_sigterm_is_left_behind(cluster: Cluster) -> None:
    """An orderly shutdown of one machine signals the agent there; its ranks are another matter."""
    process = cluster.start("-H", "hostA:2,hostB:1", "--min-np", "2", "python", cluster.script(RANK))
    cluster.await_line(process, "trains with 3", times=3)
    agent = cluster.hosts.agents("hostB")[-1]
    os.kill(agent, signal.SIGTERM)
    cluster.await_line(process, "trains with 2", times=2)
    (cluster.folder / "end").touch()
    done = cluster.finish(process, WAITING_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "the agent of hostB got SIGTERM: that host counts as lost." in done.stderr
    assert "has not confirmed" not in done.stderr and "not answered" not in done.stderr
