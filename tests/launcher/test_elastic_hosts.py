"""Hosts come and go while an elastic job trains: several in a row, all of them replaced, some that fail at once, each time.

Hosts are agents on this machine, which a stand-in for ssh starts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher, finish

SHELL = """#!/bin/bash
for word in "$@"; do
    if [ "$word" = unreachable ]; then echo tried >>{tried}; exit 255; fi
done
exec /bin/sh -c "${{@: -1}}"
"""

# The weight of a step is the mean of what the ranks bring, which is the same on all, so their number does not matter.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
phases = plan.get("phases", [])
process, host = os.environ["HOROVOD_ELASTIC_PROCESS"], os.environ["HOROVOD_HOSTNAME"]
if host == "faulty":
    with open(folder / "tried", "a") as file:
        file.write("tried ")
    sys.exit(3)
basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0, weight=1.0, phase=0, changed=time.monotonic(), over=False)
sizes = []

def decide(hosts):
    if state.phase < len(phases):
        if time.monotonic() - state.changed < plan["seconds"]:
            return ""
        (folder / "hosts").write_text(phases[state.phase])
        return "next"
    return "end" if hosts == plan["hosts"] and not (folder / "goes on").exists() else ""

def train(state):
    sizes.append(basics.size())
    hosts = []
    while not state.over:
        if (host, state.step) == (plan.get("lost"), 5):
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found = allgather_object((state.weight * 0.99 + 1, host, decide(hosts)))
        state.weight = sum(weight for weight, _, _ in found) / len(found)
        hosts = sorted(each for _, each, _ in found)
        decision = found[0][2]
        if decision == "next":
            state.phase, state.changed = state.phase + 1, time.monotonic()
        state.over = decision == "end"
        state.step += 1
        time.sleep(0.01)
        state.commit()

run_fn(train, Reset(basics.shutdown, basics.init))(state)
expected = 1.0
for _ in range(state.step):
    expected = expected * 0.99 + 1
result = [host, state.weight, abs(state.weight - expected) < 1e-9 * expected, sizes]
(folder / f"result.{process}").write_text(json.dumps(result))
"""


class Result(NamedTuple):
    """What a rank of the last round has seen.

    Attributes:
        host: its own.
        weight: in the end.
        right: whether that is the weight of an undisturbed job.
        sizes: of the rounds that it has taken part in.
    """

    host: str
    weight: float
    right: bool
    sizes: list[int]


def prepare(folder: Path, first: str, **plan: object) -> list[str]:
    """The last words of a command line: hosts are found in a file, which says ``first`` in the beginning."""
    (folder / "hosts").write_text(first)
    (folder / "train.py").write_text(SCRIPT)
    shell = folder / "shell"
    shell.write_text(SHELL.format(tried=quote(str(folder / "tried"))))
    shell.chmod(0o755)
    return [
        "--host-discovery-script",
        f"cat {quote(str(folder))}/hosts",
        "python",
        "train.py",
        str(folder),
        json.dumps(plan),
    ]


def results(folder: Path) -> dict[int, Result]:
    """By process."""
    found = {int(path.suffix[1:]): Result(*json.loads(path.read_text())) for path in folder.glob("result.*")}
    assert all(result.right for result in found.values())
    assert len({result.weight for result in found.values()}) == 1
    return found


def test_hosts_are_added_one_a_second_and_then_all_old_ones_replaced(launcher: Launcher, tmp_path: Path) -> None:
    names = ["alpha", "beta", "gamma", "delta", "epsilon"]
    windows = [names[:count] for count in range(2, 6)] + [names[first:] for first in range(1, 4)]
    phases = ["".join(f"{name}:1\n" for name in window) for window in windows]
    command = prepare(tmp_path, "alpha:1\n", phases=phases, seconds=1.0, hosts=sorted(names[3:]))
    ended = launcher.run("--min-np", "1", *command, HOROVOD_SSH_COMMAND=quote(str(tmp_path / "shell")))
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert sorted(result.host for result in found.values()) == sorted(names[3:])
    assert all(len(result.sizes) > 1 and result.sizes[-1] == 2 for result in found.values())
    assert "exit with status" not in ended.stderr and "going back" not in ended.stderr


@pytest.mark.parametrize("bad", ["faulty", "unreachable"])
@pytest.mark.parametrize("cooldown", [[], ["--blacklist-cooldown-range", "1", "1"]], ids=["for ever", "for a second"])
def test_a_host_that_fails_at_once_does_not_disturb_the_others(
    launcher: Launcher, tmp_path: Path, bad: str, cooldown: list[str]
) -> None:
    tries = 3 if cooldown else 1
    command = prepare(tmp_path, "alpha:2\n", phases=[f"alpha:2\n{bad}:1\n"], seconds=0.1, hosts=["alpha", "alpha"])
    (tmp_path / "goes on").touch()
    shell = quote(str(tmp_path / "shell"))
    job = launcher.start("--min-np", "2", *cooldown, *command, HOROVOD_SSH_COMMAND=shell)
    said = f"No new processes are started on {bad}{' for 1 seconds' if cooldown else ''}."
    launcher.await_line(job, said, tries, in_errors=True)
    (tmp_path / "goes on").unlink()
    ended = finish(job)
    assert ended.returncode == 0, ended.stderr
    assert [result.sizes for result in results(tmp_path).values()] == [[2], [2]]
    assert cooldown or said not in ended.stderr
    if not cooldown:
        assert (tmp_path / "tried").read_text().split() == ["tried"]


@pytest.mark.parametrize("comes", [True, False], ids=["a host comes", "no host comes"])
def test_a_job_that_is_too_small_waits_for_a_host_and_says_so(launcher: Launcher, tmp_path: Path, comes: bool) -> None:
    command = prepare(tmp_path, "alpha:1\nbeta:1\n", lost="beta", hosts=["alpha", "gamma"])
    words = ("--min-np", "2", "--elastic-timeout", str(int(LIMIT_SECONDS)) if comes else "1")
    process = launcher.start(*words, *command, HOROVOD_SSH_COMMAND=quote(str(tmp_path / "shell")))
    deadline = time.monotonic() + LIMIT_SECONDS
    while comes and not (tmp_path / "lost").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if comes:
        (tmp_path / "hosts").write_text("alpha:1\nbeta:1\ngamma:1\n")
    ended = finish(process)
    assert "horovodrun: 1 rank of at least 2 is left; waiting for more" in ended.stderr
    if comes:
        assert ended.returncode == 0, ended.stderr
        assert {number: result.sizes for number, result in results(tmp_path).items()} == {0: [2, 2], 2: [2]}
    else:
        assert ended.returncode == 137, ended.stderr
        assert "and no more can be started: processes have failed on beta" in ended.stderr


def test_a_job_whose_only_host_cannot_be_reached_says_so(launcher: Launcher, tmp_path: Path) -> None:
    prepare(tmp_path, "")
    words = ("-H", "unreachable:1", "--min-np", "1", "true")
    ended = launcher.run(*words, HOROVOD_SSH_COMMAND=quote(str(tmp_path / "shell")))
    assert ended.returncode == 255, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "host unreachable cannot take part: " in ended.stderr


def test_what_runs_on_the_launchers_own_host_after_it_came_back_ends_with_the_job(
    launcher: Launcher, tmp_path: Path
) -> None:
    windows = ["localhost:1\nalpha:1\n", "alpha:1\n", "alpha:1\nlocalhost:1\n"]
    command = prepare(tmp_path, "localhost:1\n", phases=windows, seconds=2.0, hosts=["never"])
    script = tmp_path / "train.py"
    says = (
        'if state.phase == len(phases) and len(hosts) == 2:\n            print("together again", flush=True)\n        '
    )
    script.write_text(script.read_text().replace("decision = found", says + "decision = found", 1))
    process = launcher.start("--min-np", "1", *command, HOROVOD_SSH_COMMAND=quote(str(tmp_path / "shell")))
    launcher.await_line(process, "together again", times=2)
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    launcher.await_nothing()


def test_an_agent_that_gets_sigterm_is_a_lost_host(launcher: Launcher, tmp_path: Path) -> None:
    """Each agent sees its own processes alone, as on a host of its own: it ends all that it finds of the job."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces of processes")
    phases = ["alpha:1\nbeta:1\ngamma:1\n"]
    command = prepare(tmp_path, "alpha:1\nbeta:1\n", phases=phases, seconds=1.0, hosts=["alpha", "gamma"])
    shell, script = tmp_path / "shell", tmp_path / "train.py"
    shell.write_text(shell.read_text().replace("exec /bin/sh", f"exec {' '.join(unshare)} /bin/sh"))
    ends = 'if (host, state.step) == ("beta", 5):\n            os.kill(os.getppid(), signal.SIGTERM)\n        '
    text = script.read_text()
    script.write_text(text.replace("found = allgather_object((", ends + "found = allgather_object((", 1))
    ended = launcher.run("--min-np", "1", *command, HOROVOD_SSH_COMMAND=quote(str(shell)))
    assert ended.returncode == 0, ended.stderr
    assert "the agent of beta got SIGTERM: that host counts as lost." in ended.stderr
    assert sorted(result.host for result in results(tmp_path).values()) == ["alpha", "gamma"]
