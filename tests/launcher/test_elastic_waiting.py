"""Elastic jobs that cannot begin or go on end at once, or say for what they wait; what is stuck holds nobody up for ever."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher, finish

SHELL = """#!/bin/bash
exit 255
"""


@pytest.mark.parametrize(
    ("hosts", "words", "command", "status", "said"),
    [
        pytest.param(
            "localhost:2", ["--min-np", "2"], ["python", "nosuchfile.py"], 2, "nosuchfile.py", id="no such file"
        ),
        pytest.param(
            "unknown:1", ["--min-np", "1"], ["true"], 255, "host unknown cannot take part: ", id="an unknown host"
        ),
        pytest.param(
            "localhost:2",
            ["--min-np", "2", "--blacklist-cooldown-range", "100", "200"],
            ["sh", "-c", "exit 7"],
            7,
            "No new processes are started on localhost for ",
            id="a cool-down",
        ),
    ],
)
def test_when_all_processes_have_failed_a_job_with_a_discovery_script_ends_at_once(
    launcher: Launcher, tmp_path: Path, hosts: str, words: list[str], command: list[str], status: int, said: str
) -> None:
    """The time limit of the test is far below that of the job's patience, ten minutes."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    ended = launcher.run(
        "--host-discovery-script", f"echo {hosts}", *words, *command, HOROVOD_SSH_COMMAND=quote(str(shell))
    )  # fmt: skip
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert "horovodrun: the job ended: all processes have failed." in ended.stderr


def test_a_job_with_too_few_slots_says_what_it_waits_for(launcher: Launcher) -> None:
    words = ("--host-discovery-script", "echo localhost:1", "--min-np", "2", "--elastic-timeout", "7", "true")
    ended = launcher.run(*words)
    assert ended.returncode == 1
    assert ended.stderr.count("horovodrun: waiting for at least 2 slots; 1 slot there (localhost:1)") == 1
    assert "Timed out waiting for minimum number of slots" in ended.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_launcher_whose_discovery_script_hangs(
    launcher: Launcher, tmp_path: Path, number: int, status: int
) -> None:
    process = launcher.start(
        "--host-discovery-script", f"touch {quote(str(tmp_path))}/asked; sleep 1000", "--min-np", "1", "true"
    )
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    ended = finish(process)
    assert ended.returncode == status and "Traceback" not in ended.stderr
    launcher.await_nothing()


# Rank 1 is stuck, outside of any collective, when the others have failed.
STUCK = """
import os, sys, time
from horovod.common import basics
from horovod.common.elastic import HorovodInternalError, ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

basics.init()
state = ObjectState(broadcast_object, basics.rank, rounds=0)

def train(state):
    if basics.size() == 3:
        allgather_object(None)
        if basics.rank() == 1:
            time.sleep(1000)
        raise HorovodInternalError("The others have failed.")
    print("goes on with", len(allgather_object(None)), flush=True)

run_fn(train, Reset(basics.shutdown, basics.init))(state)
"""


def test_a_process_that_is_stuck_holds_up_the_others_for_the_elastic_timeout(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    ended = launcher.run("-H", "localhost:3", "--min-np", "2", "--elastic-timeout", "2", "python", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("goes on with 2") == 2
    assert "has not come to the next round within 2 seconds: it is killed" in ended.stderr
