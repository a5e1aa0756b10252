"""Launchers with a low limit on open files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher, finish
from launcher.test_hosts import write

RANKS = 24
SOFT = "ulimit -Sn 64"
SHOW = ("sh", "-c", "ulimit -Sn")


def run(launcher: Launcher, limit: str, *words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """``horovodrun`` in a shell that has set a limit."""
    command = [sys.executable, "-m", "horovod.runner.launch", *map(str, words)]
    process = subprocess.Popen(
        ["sh", "-c", limit + '; exec "$@"', "sh", *command],
        env=launcher.environment(**extra),
        cwd=launcher.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    launcher.started.append(process)
    return finish(process)


@pytest.mark.parametrize("elastic", [(), ("--min-np", "2")])
def test_the_launcher_opens_what_it_needs_and_its_ranks_have_the_limit_that_it_had(
    launcher: Launcher, elastic: tuple[str, ...]
) -> None:
    done = run(launcher, SOFT, "-np", str(RANKS), *elastic, "--output-filename", launcher.folder / "out", *SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    shown = [f"[{rank}]<stdout>:64" for rank in range(RANKS)]
    assert sorted(done.stdout.splitlines()) == sorted(shown)
    kept = [(launcher.folder / "out" / f"rank.{rank:02}" / "stdout").read_text() for rank in range(RANKS)]
    assert kept == [line + "\n" for line in shown]


def test_agents_of_other_hosts_open_what_they_need_and_have_the_limit_that_their_login_set(launcher: Launcher) -> None:
    ssh = launcher.folder / "ssh"
    write(ssh, f"ulimit -Sn >> {quote(str(launcher.folder / 'seen'))}; ulimit -Sn 62")
    words = ("-np", str(RANKS), "-H", f"alpha:{RANKS - 1},beta:1", *SHOW)
    done = run(launcher, SOFT, *words, HOROVOD_SSH_COMMAND=quote(str(ssh)))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}]<stdout>:62" for rank in range(RANKS))
    assert (launcher.folder / "seen").read_text() == "64\n64\n"


@pytest.mark.parametrize("elastic", [(), ("--min-np", "2")])
def test_a_hard_limit_that_is_too_low_is_an_error_before_anything_starts(
    launcher: Launcher, elastic: tuple[str, ...]
) -> None:
    done = run(launcher, "ulimit -n 128", "-np", str(RANKS), *elastic, "touch", "started")
    assert done.returncode == 1
    assert f"horovodrun: error: the launcher of {RANKS} ranks" in done.stderr
    assert "needs 168 open files" in done.stderr and "may open 128" in done.stderr and "ulimit -Hn 2" in done.stderr
    assert not (launcher.folder / "started").exists()
