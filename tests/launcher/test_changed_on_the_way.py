"""A job of two hosts in which a network changes one control message: whoever gets it, the end of the job says so."""

from __future__ import annotations

import pytest

from launcher.harness import Launcher
from launcher.test_hosts import run, write

SCRIPT = """
import os, socket, sys
from horovod.common.basics import init, rank
from horovod.control import mesh
from horovod.control.channel import Channel
from horovod.control.liveness_links import LivenessLinks
from horovod.core.lifecycle import context
from horovod.core.submission import collectives

about_liveness, sender = sys.argv[1] == "liveness", int(sys.argv[2])
own_rank, host = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
namespace = mesh.own_process_namespace()
mesh.own_process_namespace = lambda: namespace + host  # hosts cannot see each other's processes
of_liveness, attacks = set(), False
make, pass_on = LivenessLinks.__init__, Channel._write

def made(links, rank, channels, *rest):
    of_liveness.update(channels.values())
    make(links, rank, channels, *rest)

def on_the_way(channel, data):
    between_hosts = channel.socket.family != socket.AF_UNIX
    if attacks and between_hosts and (channel in of_liveness) == about_liveness:
        data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
    return pass_on(channel, data)

LivenessLinks.__init__, Channel._write = made, on_the_way
init()
collectives.barrier().wait()
attacks = own_rank == sender
if attacks and about_liveness:
    context.current().watch.probe()
for step in range(10**9):
    collectives.barrier().wait()
"""
"""Four ranks, two on each host. What ``sender`` sends to the other host, after the first step, is changed by a bit when it has
left Horovod: behind the code that protects it."""


@pytest.mark.parametrize(
    ("kind", "sender", "relays"),
    [("control", 0, False), ("control", 2, True), ("liveness", 0, True), ("liveness", 2, False), ("liveness", 2, True)],
)
def test_a_message_that_is_changed_between_hosts_is_the_reason_that_the_launcher_names(
    launcher: Launcher, kind: str, sender: int, relays: bool
) -> None:
    ssh = launcher.folder / "ssh"
    write(ssh)
    (launcher.folder / "train.py").write_text(SCRIPT)
    words = ("-np", "4", "-H", "alpha:2,beta:2", "python", "train.py", kind, str(sender))
    done = run(launcher, ssh, *words, HOROVOD_RELAY_THRESHOLD="0" if relays else "1000")
    assert done.returncode == 1, done.stderr
    last = done.stderr[done.stderr.index("horovodrun: the job failed.") :]
    assert " is not safe: what arrives is not what was sent" in last, last
    told = [line for line in done.stderr.splitlines() if "HorovodInternalError: " in line or "RankLostError: " in line]
    words = (" is not safe: what arrives ", "the same text as ")
    assert told and all(any(each in line for each in words) for line in told), "\n".join(told) + last
