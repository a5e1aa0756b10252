"""``horovodrun --dry-run``: it shows the job that would be, and there is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher
from time_limits import SOON


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"^    (\w+)=(.*)$", text, re.MULTILINE))


def test_nothing_is_started_and_the_secret_is_not_shown(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run(
        "--dry-run", "-np", "2", "--output-filename", "out", "touch", "a file", _HOROVOD_SECRET_KEY="my own secret"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
    assert variables(done.stdout)["_HOROVOD_SECRET_KEY"] == "SECRET"
    assert "my own secret" not in done.stdout
    assert done.stdout.count("touch 'a file'") == 2


def test_what_it_shows_is_what_ranks_get(launcher: Launcher) -> None:
    words = ("-np", "2", "--fusion-threshold-mb", "2", "env")
    shown = launcher.run("--dry-run", *words).stdout
    ran = launcher.run(*words).stdout
    common = {name: value for name, value in variables(shown).items() if value not in ("PORT", "FREE_PORT", "SECRET")}
    assert {"HOROVOD_FUSION_THRESHOLD", "OMP_NUM_THREADS", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} <= common.keys()
    for rank, line in enumerate(re.findall(r"^    env (.*) env$", shown, re.MULTILINE)):
        found = dict(
            line.partition(":")[2].partition("=")[::2] for line in ran.splitlines() if line.startswith(f"[{rank}]")
        )
        assert {**common, **dict(each.split("=") for each in line.split())}.items() <= found.items()
        assert found["HOROVOD_RANK"] == str(rank)


def test_flags_without_effect_are_said_to_have_none(launcher: Launcher) -> None:
    words = ("-np", "2", "-p", "22", "--disable-cache", "--mpi-args=-x", "true")
    told = [line.removeprefix("horovodrun: ") for line in launcher.run(*words).stderr.splitlines()]
    assert len(told) == 3
    shown = launcher.run("--dry-run", *words).stdout.splitlines()
    assert [line for line in shown if "has no effect" in line] == told
    elastic = launcher.run("--dry-run", "--min-np", "3", "--host-discovery-script", "echo localhost:2", *words[2:])
    assert "--disable-cache has no effect: nothing is cached" in elastic.stdout.splitlines()


def test_other_hosts_are_not_asked(launcher: Launcher, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ntouch {quote(str(tmp_path))}/asked\n")
    ssh.chmod(0o755)
    words = ("--dry-run", "-np", "3", "-H", "localhost:1,me@no-such-host:2", "-p", "2222", "python", "train.py")
    done = launcher.run(*words, HOROVOD_SSH_COMMAND=quote(str(ssh)), MY_PASSWORD="hush", CUDA_VISIBLE_DEVICES="3")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "asked").exists()
    here, there = done.stdout.split("Ranks 1 and 2 on me@no-such-host")
    assert "Rank 0 on localhost" in here
    assert f"{quote(str(ssh))} -o " in there and " -p 2222 me@no-such-host " in there
    assert "MY_PASSWORD" in there and "hush" not in done.stdout
    assert "CUDA_VISIBLE_DEVICES" not in there
    assert "OMP_NUM_THREADS=CORES" in there
    assert "reaches the launcher at one of" in there


@pytest.mark.parametrize(
    "words", [("-np", "0", "true"), ("-np", "2", "no-such-command"), ("-np", "3", "-H", "a:2", "true")]
)
def test_a_request_that_is_wrong_is_refused_as_ever(launcher: Launcher, words: tuple[str, ...]) -> None:
    assert launcher.run("--dry-run", *words).returncode == 2


def test_an_elastic_job_shows_its_limits_its_hosts_and_its_first_round(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost:2\necho no-such-host:4\n")
    script.chmod(0o755)
    words = ("--min-np", "2", "--max-np", "5", "--reset-limit", "9", "--host-discovery-script", script)
    done = launcher.run("--dry-run", *words, "touch", "started")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "started").exists()
    assert "A round has at least 2 ranks and at most 5. Not more than 9 rounds follow the first." in done.stdout
    assert f"'{script}' is run every 1 s, and now prints localhost:2, no-such-host:4" in done.stdout
    assert "The first round has 5 ranks:" in done.stdout
    here, there = done.stdout.split("Ranks 2 to 4 on no-such-host")
    assert "Ranks 0 and 1 on localhost" in here
    assert re.findall(r"HOROVOD_RANK=(\d) .* HOROVOD_ELASTIC=1 HOROVOD_ELASTIC_PROCESS=(\d) touch", here + there) == [
        (str(number), str(number)) for number in range(5)
    ]


def test_an_elastic_job_without_enough_slots_shows_that_it_would_wait(launcher: Launcher) -> None:
    words = ("--min-np", "3", "--elastic-timeout", "60", "--host-discovery-script", "echo localhost:2")
    done = launcher.run("--dry-run", *words, "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert "It starts nothing until there are 3 slots; now there are 2." in done.stdout
    assert "It would wait for them, 60 seconds at most." in done.stdout
    assert "rank 0" not in done.stdout


def test_an_elastic_job_on_fixed_hosts_shows_that_no_others_come(launcher: Launcher) -> None:
    done = launcher.run("--dry-run", "--min-np", "2", "-H", "localhost:3", "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert "A round has at least 2 ranks and as many as there are slots." in done.stdout
    assert "Hosts: these and no others: localhost:3" in done.stdout
    assert "The first round has 3 ranks:" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_it_ends_without_a_traceback_if_nobody_reads_what_it_shows(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "horovod.runner.launch", "--dry-run", "-np", "2", "true"]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=SOON, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
