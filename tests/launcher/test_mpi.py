"""``horovodrun --mpi`` and ``horovod.run(use_mpi=True)`` on one host, with the ``mpirun`` of each MPI that is installed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import mpi_wheels
from launcher.harness import Launcher, last_words
from time_limits import SOON

PATIENCE_SECONDS = SOON
JOB = r"""
import os, sys, time
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.environments import identity
from horovod.core.submission.collectives import barrier
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # at once: mpirun mixes the parts of lines
basics.init()
me = context.current().identity
barrier().wait()
"""


class Mpi:
    """A launcher that finds one MPI's ``mpirun``."""

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.launcher = launcher
        self.name = name
        self.environment = mpi_wheels.environment(name)

    def start(self, program: str, *words: str, ranks: int = 2) -> subprocess.Popen[str]:
        (self.launcher.folder / "job.py").write_text(JOB + program)
        return self.launcher.start("--mpi", "-np", str(ranks), *words, "python", "job.py", **self.environment)

    def run(self, program: str, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        return finish(self.start(program, *words, ranks=ranks))


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(params=mpi_wheels.MPIS)
def mpi(request: pytest.FixtureRequest, launcher: Launcher) -> Mpi:
    reason = mpi_wheels.obstacle(request.param)
    if reason:
        pytest.skip(reason)
    return Mpi(launcher, request.param)


def test_ranks_meet_and_know_their_ranks(mpi: Mpi) -> None:
    done = mpi.run("say('RANK', me.rank, me.size, me.local_rank, me.local_size, me.cross_rank, me.cross_size)", ranks=3)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"RANK .*", done.stdout)) == [f"RANK {rank} 3 {rank} 3 0 1" for rank in range(3)]
    assert not done.stderr


def test_the_command_is_shown_on_request_and_nobody_sees_the_secret(mpi: Mpi) -> None:
    process = mpi.start("say('ready')\ntime.sleep(3)", "--verbose")
    mpi.launcher.await_line(process, "ready", times=2)
    lines = mpi.launcher.living()
    (rank, *_) = [pid for pid, line in lines.items() if line == "python job.py "]
    secret = psutil.Process(rank).environ()["_HOROVOD_SECRET_KEY"]
    assert len(secret) == 44 and not [line for line in lines.values() if secret in line]
    done = finish(process)
    assert done.returncode == 0
    assert re.search(
        rf"horovodrun: 2 ranks by \w.*: {re.escape(str(mpi_wheels.prefix(mpi.name)))}/bin/mpirun .*", done.stderr
    )
    assert secret not in done.stdout + done.stderr


def test_a_dry_run_shows_the_command_and_starts_nothing(mpi: Mpi) -> None:
    words = ("--mpi", "--dry-run", "-np", "2", "--output-filename", "out", "touch", "started")
    done = finish(mpi.launcher.start(*words, **mpi.environment))
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 ranks by \w.*: \S+/mpirun .* touch started$", done.stdout, re.MULTILINE)
    assert not list(mpi.launcher.folder.iterdir())


def test_the_rank_that_failed_first_is_named(mpi: Mpi) -> None:
    done = mpi.run("if me.rank == 1:\n    raise ValueError('out of luck')\nbarrier().wait()")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    index = lines.index("horovodrun: the job failed: mpirun ended with exit code 1.")
    assert lines[index + 1].startswith("Rank 1 failed first. Reason: it raised ValueError: out of luck (at ")


def test_a_killed_rank_ends_the_job(mpi: Mpi) -> None:
    # The other ranks would go on for long: mpirun must end them.
    done = mpi.run("if me.rank == 1:\n    os.kill(os.getpid(), 9)\nbarrier().wait()\ntime.sleep(1000)")
    assert done.returncode not in (0, None)
    assert "horovodrun: the job failed: mpirun ended with exit code" in done.stderr
    mpi.launcher.await_nothing()


def test_ctrl_c_ends_the_job(mpi: Mpi) -> None:
    process = mpi.start("say('ready')\ntime.sleep(1000)")
    mpi.launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 128 + signal.SIGINT
    assert last_words(done.stderr) == "horovodrun: ended by SIGINT"
    mpi.launcher.await_nothing()


def test_a_second_ctrl_c_kills_ranks_that_take_no_notice(mpi: Mpi) -> None:
    process = mpi.start("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready')\ntime.sleep(1000)")
    mpi.launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)  # longer than what counts as one signal twice
    process.send_signal(signal.SIGINT)
    # An mpirun that is quicker than that has ended them already: then the signal meets a launcher that is about to end.
    assert finish(process).returncode in (128 + signal.SIGINT, -signal.SIGINT)
    mpi.launcher.await_nothing()


def test_a_killed_launcher_leaves_nothing(mpi: Mpi) -> None:
    process = mpi.start("say('ready')\ntime.sleep(1000)")
    mpi.launcher.await_line(process, "ready", times=2)
    process.kill()
    mpi.launcher.await_nothing()


def test_each_ranks_output_goes_to_files(mpi: Mpi) -> None:
    done = mpi.run("say('hello of', me.rank)", "--output-filename", "out")
    assert done.returncode == 0, done.stderr
    files = [path.read_text() for path in (mpi.launcher.folder / "out").rglob("*") if path.is_file()]
    for rank in range(2):
        assert sum(f"hello of {rank}" in text for text in files) == 1


def test_the_configuration_file_can_ask_for_mpi(mpi: Mpi) -> None:
    (mpi.launcher.folder / "config.yaml").write_text("controller: mpi\n")
    words = ("-np", "1", "--config-file", "config.yaml", "--verbose", "true")
    done = finish(mpi.launcher.start(*words, **mpi.environment))
    assert done.returncode == 0 and "horovodrun: 1 ranks by " in done.stderr


FUNCTION = """
import horovod
from horovod.environments import identity
def work(offset):
    if identity().rank == offset:
        raise KeyError("gone")
    return identity().rank + offset
print("RESULT", horovod.run(work, (5,), num_proc=2, use_mpi=True))
try:
    horovod.run(work, (1,), num_proc=2, use_mpi=True)
except RuntimeError as error:
    print("ERROR", str(error).splitlines()[0], repr(error.__cause__))
"""


def test_a_function_runs_under_mpirun_and_returns(mpi: Mpi) -> None:
    done = finish(mpi.launcher.python("-c", FUNCTION, **mpi.environment))
    assert "RESULT [5, 6]\n" in done.stdout, done.stderr
    assert "ERROR rank 1 failed: KeyError('gone')\n" in done.stdout


def test_without_mpirun_the_user_is_told_what_to_install(launcher: Launcher) -> None:
    (launcher.folder / "python").symlink_to(sys.executable)
    done = launcher.run("--mpi", "-np", "2", "python", "x.py", PATH=str(launcher.folder))
    assert done.returncode == 1
    assert done.stderr.startswith("horovodrun: error: there is no mpirun on PATH. Install an MPI (pip install mpich; ")
    assert not Path(launcher.folder, "out").exists()
