"""Which ranks of an elastic job synchronise their states: all of a round, or none, whatever each was told in the round before.

Hosts are agents on this machine, which a stand-in for ssh starts. The scenes are put in their order by files and not by time.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher

SHELL = """#!/bin/bash
exec /bin/sh -c "${@: -1}"
"""

# The weight of a step is the mean of what the ranks bring, which is the same on all, so their number does not matter.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object
from horovod.control.elastic_messages import message_key
from horovod.control.mesh import Mesh
from horovod.control.rendezvous.client import RendezvousClient
from horovod.core.lifecycle.elastic_process import this_process

folder, scene, STEPS = Path(sys.argv[1]), sys.argv[2], 12
process, host = os.environ["HOROVOD_ELASTIC_PROCESS"], os.environ["HOROVOD_HOSTNAME"]

def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.005)

def set_hosts(text):
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "hosts")

def is_there(name):
    return (folder / name).exists

def hears_of_hosts():
    return this_process()._listener._hosts

put = RendezvousClient.put
def put_and_note(self, key, value, **options):
    put(self, key, value, **options)  # returns when the launcher has it
    if key == message_key(int(process)):
        (folder / f"ready.{process}").touch()
RendezvousClient.put = put_and_note

connect = Mesh.connect
def connect_or_die(self, *arguments):
    if os.environ["HOROVOD_ELASTIC_ROUND"] == "2" and process == "1":
        set_hosts("alpha:1\\nbeta:1\\ndelta:1\\n")
        wait_until(is_there("ready.3"))
        os.kill(os.getpid(), signal.SIGKILL)
    return connect(self, *arguments)
if scene == "retry":
    Mesh.connect = connect_or_die

basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0, weight=1.0)
calls, interrupts = [], []

class Watched(ObjectState):
    def sync(self):
        calls.append([os.environ["HOROVOD_ELASTIC_ROUND"], "sync"])
        super().sync()
state.__class__ = Watched

def check():
    try:
        state.check_host_updates()
    except HostsUpdatedInterrupt as interrupt:
        if scene == "failure" and process == "1":
            raise HorovodInternalError("The broadcast failed on this rank.") from None
        interrupts.append(interrupt.skip_sync)
        raise

def disturb():
    if scene == "withdrawn":
        if basics.rank() == 0:
            set_hosts("alpha:1\\ngamma:1\\n")
        wait_until(is_there("ready.2"))
    elif scene == "SIGTERM":
        if process == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(is_there("ready.2"))
    elif basics.rank() == 0:
        set_hosts("alpha:1\\nbeta:1\\n")
    wait_until(hears_of_hosts)

def train(state):
    calls.append([os.environ["HOROVOD_ELASTIC_ROUND"], "train"])
    while state.step < STEPS:
        if state.step == 5 and os.environ["HOROVOD_ELASTIC_ROUND"] == "1":
            disturb()
        found = allgather_object(state.weight * 0.01 + state.step)
        state.weight += sum(found) / len(found)
        state.step += 1
        state.save()
        check()

run_fn(train, Reset(basics.shutdown, basics.init))(state)
result = {"weight": state.weight, "rank": basics.rank(), "size": basics.size(), "calls": calls, "only removed": interrupts}
(folder / f"result.{process}").write_text(json.dumps(result))
"""


def undisturbed() -> float:
    weight = 1.0
    for step in range(12):
        weight += weight * 0.01 + step
    return weight


@pytest.mark.parametrize(
    ("scene", "hosts", "most", "left"),
    [
        # The ranks were told that hosts are only removed. A new process comes before the next commit, and joins them.
        pytest.param("withdrawn", "alpha:1\nbeta:1\n", 2, {0, 2}, id="a host is replaced before the next commit"),
        pytest.param(
            "SIGTERM", "alpha:3\n", 2, {0, 2}, id="a rank that got SIGTERM is replaced before the next commit"
        ),
        # They were told so, and the next round could not begin. A new process joins them in the one after that.
        pytest.param("retry", "alpha:1\nbeta:1\ngamma:1\n", 3, {0, 3}, id="a rank is lost while the next round begins"),
        # One was interrupted at the check; the other one failed there.
        pytest.param("failure", "alpha:1\nbeta:1\ngamma:1\n", 3, {0, 1}, id="another rank fails at the same check"),
        # Nothing else happens: no rank has anything to learn from the others.
        pytest.param("only removed", "alpha:1\nbeta:1\ngamma:1\n", 3, {0, 1}, id="hosts are only removed"),
    ],
)
def test_all_ranks_of_a_round_synchronise_or_none(
    launcher: Launcher, tmp_path: Path, scene: str, hosts: str, most: int, left: set[int]
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    count = 2 if most == 2 else 3
    ended = launcher.run(
        "--host-discovery-script", f"cat {quote(str(tmp_path))}/hosts", "-np", str(count), "--min-np", "1",
        "--max-np", str(most), "python", "train.py", str(tmp_path), scene, HOROVOD_SSH_COMMAND=quote(str(shell)),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in tmp_path.glob("result.*")}
    assert set(found) == left, ended.stderr
    assert all(each["weight"] == pytest.approx(undisturbed(), rel=1e-12) for each in found.values())
    assert found[0]["only removed"] == [True], "the ranks were told that they need not synchronise"
    last = max(int(number) for number, _ in found[0]["calls"])
    calls = [[call for number, call in each["calls"] if int(number) == last] for each in found.values()]
    assert all(each == (["train"] if scene == "only removed" else ["sync", "train"]) for each in calls)
