"""Networks between hosts: several are used together, and one that leads nowhere is told of, or left out."""

from __future__ import annotations

import pytest

from cluster.conftest import Cluster
from cluster.hosts import INTERFACES, SECOND

SUM = """
import numpy, plain
plain.init()
data = numpy.arange(1 << 20, dtype=numpy.float32)
for step in range(8):
    total = plain.allreduce(data * (plain.rank() + 1), f"step{step}")
assert (total == data * sum(range(1, plain.size() + 1))).all()
print("done", flush=True)
"""
BYTES = 8 * (4 << 20)
"""What each of two ranks receives at least: its peer's half of every tensor, and half of the result."""


@pytest.fixture
def second_network(cluster: Cluster) -> None:
    cluster.hosts.second_network("hostA", "hostB", up=True)


def carried(cluster: Cluster, *words: str, warning: str = "") -> tuple[int, int]:
    """What hostB received by its two interfaces in a job of one rank on each of two hosts, which says ``warning``."""
    hosts = cluster.hosts
    before = [hosts.received("hostB", names["hostB"]) for names in (INTERFACES, SECOND)]
    done = cluster.run(*words, "-np", "2", "-H", "hostA:1,hostB:1", "python", cluster.script(SUM))
    assert done.returncode == 0 and done.stdout.count("done") == 2 and warning in done.stderr, done.stderr
    after = [hosts.received("hostB", names["hostB"]) for names in (INTERFACES, SECOND)]
    first, second = (now - then for now, then in zip(after, before, strict=True))
    return first, second


@pytest.mark.usefixtures("second_network")
def test_data_takes_all_networks_that_both_hosts_have(cluster: Cluster) -> None:
    first, second = carried(cluster)
    assert first + second > BYTES and min(first, second) > 0.4 * BYTES


@pytest.mark.usefixtures("second_network")
def test_a_network_can_be_chosen(cluster: Cluster) -> None:
    """ssh takes its own way all the same."""
    first, second = carried(cluster, "--network-interfaces", ",".join(SECOND.values()))
    assert second > BYTES and first < 0.05 * BYTES


def test_a_network_that_leads_nowhere_is_left_out(cluster: Cluster) -> None:
    warning = "no rank uses address 10.78.0.1 of hostA: hostB cannot reach it (no answer)"
    with cluster.hosts.broken_second_network():
        first, second = carried(cluster, warning=warning)
    assert first > BYTES and second < 0.01 * BYTES


STEPS = """
import numpy, plain
plain.init()
data = numpy.ones(1 << 18, numpy.float32)
for step in range(10**6):
    plain.allreduce(data, "data")
    if step == 10:
        print("ready", flush=True)
"""


@pytest.mark.usefixtures("second_network")
def test_a_network_that_breaks_in_the_middle_is_named(cluster: Cluster) -> None:
    """The other one still works, so all ranks answer when they are asked."""
    words = ["-np", "2", "-H", "hostA:1,hostB:1", "python", cluster.script(STEPS)]
    process = cluster.start(*words, HOROVOD_GLOO_TIMEOUT_SECONDS="9")
    cluster.await_line(process, "ready", times=2)
    cluster.hosts.unplug_second("hostB")
    done = cluster.finish(process)
    assert done.returncode != 0
    (reason,) = [line for line in done.stderr.splitlines() if line.startswith("Reason: ")]
    assert "its host is silent on the connection from 10.78.0." in reason and "that network is broken" in reason, (
        done.stderr
    )


@pytest.mark.parametrize("side", [("hostB", "hostC"), ("hostC", "hostB")], ids="-".join)
def test_a_firewall_between_two_of_three_hosts_is_told_as_that(cluster: Cluster, side: tuple[str, str]) -> None:
    with cluster.hosts.no_way(*side):
        done = cluster.run("-np", "3", "-H", "hostA:1,hostB:1,hostC:1", "python", cluster.script(SUM))
    assert done.returncode != 0
    reason = done.stderr[done.stderr.index("horovodrun: the job failed.") :].splitlines()
    assert reason[:3] == [
        "horovodrun: the job failed. Rank 2 failed first (hostC, local rank 0).",
        "Reason: Horovod initialization failed: hosts of this job cannot reach each other:",
        "  hostC cannot reach hostB at any of its addresses: 10.77.0.2 (no answer)",
    ], done.stderr
    assert "hostA cannot" not in done.stderr and "reach hostA" not in done.stderr


@pytest.mark.parametrize("also_named", [False, True], ids=["IPv6", "names of both"])
def test_hosts_with_ipv6_alone(cluster: Cluster, also_named: bool) -> None:
    with cluster.hosts.only_ipv6("hostA", "hostB", also_named=also_named):
        done = cluster.run("-np", "4", "-H", "hostA:2,hostB:2", "python", cluster.script(SUM))
    assert done.returncode == 0 and done.stdout.count("done") == 4, done.stderr


def test_ranks_with_ipv6_alone_that_no_launcher_of_ours_starts(cluster: Cluster) -> None:
    """Rank 0 serves the rendezvous; the other finds it by a name that resolves to an IPv4 address, too."""
    variables = {
        "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "hostA", "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400", "HOROVOD_SECRET_KEY": "a" * 32,
    }  # fmt: skip
    script = cluster.script(SUM)
    with cluster.hosts.only_ipv6("hostA", "hostB", also_named=True):
        ranks = []
        for rank, host in enumerate(("hostA", "hostB")):
            own = [f"{name}={value}" for name, value in variables.items()]
            own += [f"HOROVOD_RANK={rank}", f"HOROVOD_CROSS_RANK={rank}", f"HOROVOD_HOSTNAME={host}"]
            command = cluster.hosts.on(host, "env", *own, "python", script, folder=cluster.folder)
            ranks.append(cluster.start_words(command))
        ended = [cluster.finish(rank) for rank in ranks]
    assert [(each.returncode, each.stdout) for each in ended] == [(0, "done\n")] * 2, ended
