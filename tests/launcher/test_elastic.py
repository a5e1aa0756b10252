"""Elastic jobs as users start them: ranks are killed, added and taken away, and training goes on in the same processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher, finish

# Each step adds the mean of what the ranks bring, which is the same on all, so the result does not depend on their number.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

folder = Path(sys.argv[1])
plan = json.loads((folder / "plan.json").read_text())
process, pid = os.environ["HOROVOD_ELASTIC_PROCESS"], os.getpid()
sizes = []
if plan.get("dies_connecting") == process:  # when the ranks have met, and before they are connected
    from horovod.control.mesh import Mesh
    Mesh.connect = lambda *_: os.kill(pid, signal.SIGKILL)
basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0, weight=1.0)

def train(state):
    sizes.append(basics.size())
    if plan.get("say"):
        print("trains", flush=True)
    while state.step < plan["steps"] or plan.get("until") not in (None, basics.size()):
        if plan.get("kill", {}).get(process) == state.step:
            os.kill(pid, signal.SIGKILL)
        if plan.get("stop", {}).get(process) == state.step:
            os.kill(pid, signal.SIGSTOP)
        if plan.get("leave", {}).get(process) == state.step:
            os.kill(pid, signal.SIGTERM)
        if plan.get("hosts", {}).get(str(state.step)) and basics.rank() == 0:
            (folder / "hosts").write_text(plan["hosts"][str(state.step)])
        gradients = allgather_object(state.weight * 0.01 + state.step)
        if state.step < plan["steps"]:
            state.weight += sum(gradients) / len(gradients)
        state.step += 1
        time.sleep(plan.get("pause", 0))
        state.commit()
    return state.weight

weight = run_fn(train, Reset(basics.shutdown, basics.init))(state)
assert os.getpid() == pid and os.environ["HOROVOD_RANK"] == str(basics.rank())
(folder / f"result.{process}").write_text(json.dumps([weight, basics.rank(), basics.size(), sizes]))
"""

Result = tuple[float, int, int, list[int]]


def prepare(folder: Path, **plan: object) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "plan.json").write_text(json.dumps(plan))
    return ["python", "train.py", str(folder)]


def results(folder: Path) -> dict[int, Result]:
    return {int(path.suffix[1:]): tuple(json.loads(path.read_text())) for path in folder.glob("result.*")}


def undisturbed(steps: int) -> float:
    weight = 1.0
    for step in range(steps):
        weight += weight * 0.01 + step
    return weight


@pytest.mark.parametrize(("process", "step"), [(0, 0), (0, 7), (1, 3), (2, 11)])
def test_survivors_of_a_killed_rank_train_on_in_their_processes(
    launcher: Launcher, tmp_path: Path, process: int, step: int
) -> None:
    command = prepare(tmp_path, steps=12, kill={process: step})
    ended = launcher.run("-H", "localhost:3", "--min-np", "2", *command)
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {0, 1, 2} - {process}
    for weight, _, size, sizes in found.values():
        assert weight == pytest.approx(undisturbed(12), rel=1e-12)
        assert (size, sizes) == (2, [3, 2])
    assert sorted(rank for _, rank, _, _ in found.values()) == [0, 1]
    assert (
        f"Process {process} (rank {process}, on localhost) exit with status code 137 (killed by SIGKILL)"
        in ended.stderr
    )
    assert "round 2 begins with 2 ranks on 1 host" in ended.stderr


@pytest.mark.parametrize("process", ["0", "2"])
def test_a_rank_that_dies_while_all_connect_does_not_cost_the_others_the_start_timeout(
    launcher: Launcher, tmp_path: Path, process: str
) -> None:
    command = prepare(tmp_path, steps=3, dies_connecting=process)
    ended = launcher.run("-H", "localhost:3", "--min-np", "2", "--start-timeout", "600", *command)
    assert ended.returncode == 0, ended.stderr
    assert {size for _, _, size, _ in results(tmp_path).values()} == {2}


def test_ranks_are_lost_one_after_another_at_random_steps(launcher: Launcher, tmp_path: Path) -> None:
    chance = random.Random(5)
    steps = sorted(chance.sample(range(20), 3))
    command = prepare(tmp_path, steps=20, kill=dict(zip(chance.sample(range(4), 3), steps, strict=True)))
    ended = launcher.run("-H", "localhost:4", "--min-np", "1", *command)
    assert ended.returncode == 0, ended.stderr
    ((weight, rank, size, sizes),) = results(tmp_path).values()
    assert weight == pytest.approx(undisturbed(20), rel=1e-12)
    assert (rank, size, sizes) == (0, 1, [4, 3, 2, 1])


def test_a_rank_is_added_when_the_discovery_script_finds_a_slot_more(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:1\n")
    command = prepare(tmp_path, steps=10, hosts={"5": "localhost:2\n"}, until=2, pause=0.02)
    script = f"cat {quote(str(tmp_path / 'hosts'))}"
    ended = launcher.run("--host-discovery-script", script, "--min-np", "1", *command)
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert {number: result[1] for number, result in found.items()} == {0: 0, 1: 1}
    assert found[0][3] == [1, 2]
    for weight, _, _, _ in found.values():
        assert weight == pytest.approx(undisturbed(10), rel=1e-12)


def test_a_rank_is_taken_away_when_its_slot_is_withdrawn(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:3\n")
    command = prepare(tmp_path, steps=10, hosts={"5": "localhost:2\n"}, until=2, pause=0.02)
    script = f"cat {quote(str(tmp_path / 'hosts'))}"
    ended = launcher.run("--host-discovery-script", script, "--min-np", "1", *command)
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {0, 1}
    assert {tuple(sizes) for _, _, _, sizes in found.values()} == {(3, 2)}
    assert "exit with status" not in ended.stderr


def test_a_rank_that_is_asked_to_end_leaves_without_an_error(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=10, leave={0: 4}, until=2, pause=0.02)
    ended = launcher.run("-H", "localhost:3", "--min-np", "2", *command)
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {1, 2}
    assert {tuple(sizes) for _, _, _, sizes in found.values()} == {(3, 2)}
    assert "exit with status" not in ended.stderr
    assert "going back" not in ended.stderr


def test_a_rank_that_is_stopped_is_ended_and_the_others_go_on(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=6, stop={1: 3})
    ended = launcher.run("-H", "localhost:3", "--min-np", "2", *command, HOROVOD_GLOO_TIMEOUT_SECONDS="3")
    assert ended.returncode == 0, ended.stderr
    assert {number: result[2] for number, result in results(tmp_path).items()} == {0: 2, 2: 2}


def test_a_host_where_a_rank_fails_is_left_out_and_another_one_joins(launcher: Launcher, tmp_path: Path) -> None:
    """Hosts are agents on this machine, which a stand-in for ssh starts."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\nexec /bin/sh -c "${@: -1}"\n')
    shell.chmod(0o755)
    (tmp_path / "hosts").write_text("alpha:1\nbeta:1\n")
    command = prepare(tmp_path, steps=10, pause=0.02, kill={1: 4}, hosts={"6": "alpha:1\ngamma:2\n"}, until=3)
    script = f"cat {quote(str(tmp_path / 'hosts'))}"
    ended = launcher.run(
        "--host-discovery-script", script, "--min-np", "1", "-np", "2", *command, HOROVOD_SSH_COMMAND=quote(str(shell))
    )
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert found[0][3] == [2, 1, 3]
    assert sorted(found) == [0, 2, 3]
    for weight, *_ in found.values():
        assert weight == pytest.approx(undisturbed(10), rel=1e-12)


def test_a_lost_rank_is_replaced_once_its_host_has_cooled_down(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=10, kill={1: 4}, pause=0.02, until=2)
    ended = launcher.run(
        "-H", "localhost:2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1", *command
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {0, 2}
    assert found[0][3] == [2, 1, 2]
    assert {weight for weight, *_ in found.values()} == {found[0][0]}


def test_too_few_ranks_end_the_job_with_the_exit_code_of_the_lost_one(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=10, kill={1: 4})
    ended = launcher.run("-H", "localhost:2", "--min-np", "2", *command)
    assert ended.returncode == 137
    assert (
        "1 rank of at least 2 is left, and no more can be started: processes have failed on localhost" in ended.stderr
    )
    assert "NoNextRound" in ended.stderr, "the survivor can save what it has"


def test_a_job_without_enough_hosts_ends_with_an_error(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=1)
    ended = launcher.run(
        "--host-discovery-script", "echo localhost:1", "--min-np", "2", "--elastic-timeout", "1", *command
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Timed out waiting for minimum number of slots to become available" in ended.stderr


def test_the_reset_limit_ends_the_job(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=10, kill={1: 2, 2: 5})
    ended = launcher.run("-H", "localhost:3", "--min-np", "1", "--reset-limit", "1", *command)
    assert ended.returncode == 137
    assert "number of resets during elastic job exceeded limit: 1" in ended.stderr


# What goes wrong in each round, before any step is completed.
FAILS_AGAIN = """
import sys
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

basics.init()
rounds = 0

def train(state):
    global rounds
    rounds += 1
    print(f"round {rounds} trains", flush=True)
    if sys.argv[1] == "disagree":
        broadcast_object(1, root_rank=basics.rank(), name="x")
    elif basics.rank() == basics.size() - 1:
        raise KeyError("no such column")
    allgather_object(1)
    state.commit()

run_fn(train, Reset(basics.shutdown, basics.init))(ObjectState(broadcast_object, basics.rank))
"""


def test_ranks_that_disagree_end_an_elastic_job_at_once(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_AGAIN)
    ended = launcher.run("-H", "localhost:2", "--min-np", "1", "python", "fails.py", "disagree")
    assert ended.returncode == 1
    assert ended.stdout.count("trains") == 2 and "round 2" not in ended.stdout + ended.stderr
    assert "horovodrun: the job ended: Mismatched BROADCAST root ranks" in ended.stderr


def test_a_script_that_raises_the_same_in_three_rounds_ends_an_elastic_job(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_AGAIN)
    ended = launcher.run("-H", "localhost:5", "--min-np", "1", "python", "fails.py", "raise")
    assert ended.returncode == 1
    assert "round 3 trains" in ended.stdout and "round 4" not in ended.stdout + ended.stderr
    assert "3 rounds in a row have ended by the same exception of the script" in ended.stderr
    assert "KeyError: 'no such column'" in ended.stderr


def test_a_command_that_fails_everywhere_ends_the_job_with_its_exit_code(launcher: Launcher) -> None:
    ended = launcher.run("-H", "localhost:2", "--min-np", "1", "sh", "-c", "exit 7")
    assert ended.returncode == 7, ended.stderr


def test_programs_that_never_call_init_may_end_well(launcher: Launcher) -> None:
    assert launcher.run("-H", "localhost:2", "--min-np", "1", "true").returncode == 0


def test_ctrl_c_ends_ranks_that_train(launcher: Launcher, tmp_path: Path) -> None:
    command = prepare(tmp_path, steps=10**6, pause=0.05, say=True)
    process = launcher.start("-H", "localhost:2", "--min-np", "1", *command)
    launcher.await_line(process, "trains", times=2)
    process.send_signal(2)
    assert finish(process).returncode == 130


def test_ctrl_c_ends_an_elastic_job(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start("-H", "localhost:2", "--min-np", "1", "sh", "-c", "echo up; sleep 1000")
    launcher.await_line(process, "up", times=2)
    process.send_signal(2)
    assert finish(process).returncode == 130
