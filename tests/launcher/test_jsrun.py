"""Ranks that jsrun starts in an LSF job. Neither is here: variables are as IBM documents them, and jsrun is a stand-in."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from launcher.harness import Launcher
from time_limits import SOON

JSRUN = r"""#!{python}
# Starts the ranks of an explicit resource file on this machine, as jsrun does on their hosts; ends all when one has failed.
import os, re, subprocess, sys
words = sys.argv[1:]
open("words", "w").write("\n".join(words))
assert words[0] == "--erf_input"
text = open(words[1]).read()
open("ranks.erf", "w").write(text)
ranks = [(int(rank), host) for rank, host in re.findall(r"^rank: (\d+): \{{ hostname: (\S+); ", text, re.M)]
hosts = [host for _, host in ranks]
children = []
for rank, host in ranks:
    own = dict(
        JSM_NAMESPACE_RANK=rank, JSM_NAMESPACE_SIZE=len(ranks), JSM_NAMESPACE_LOCAL_RANK=hosts[:rank].count(host),
        JSM_NAMESPACE_LOCAL_SIZE=hosts.count(host), PMIX_NAMESPACE="jsm-1", PMIX_HOSTNAME=host, PMIX_RANK=rank,
    )
    command = words[2:]
    children.append(subprocess.Popen(command, env={{**os.environ, **{{name: str(value) for name, value in own.items()}}}}))
status = 0
while children and not status:
    pid, found = os.wait()
    status = os.waitstatus_to_exitcode(found)
    children = [child for child in children if child.pid != pid]
for child in children:
    child.terminate()
    child.wait()
sys.exit(status if status >= 0 else 128 - status)
"""
RANK = """
import sys
from horovod.core.submission import collectives
from horovod.common import basics
from horovod.core.lifecycle import context
basics.init()
collectives.barrier().wait()
me = context.current().identity
sys.stdout.write(f"{me.rank}/{me.size} {me.local_rank}/{me.local_size} {me.cross_rank}/{me.cross_size} {me.hostname}\\n")
sys.stdout.flush()
if len(sys.argv) > 1 and me.rank == 1:
    raise SystemError("bad luck")
if len(sys.argv) > 1:
    collectives.barrier().wait()
basics.shutdown()
"""
LSF = {"LSB_JOBID": "77", "LSB_MCPU_HOSTS": "localhost 2 127.0.0.1 1"}
EXPECTED = ["0/3 0/2 0/2 localhost", "1/3 1/2 0/1 localhost", "2/3 0/1 1/2 127.0.0.1"]


@pytest.fixture
def lsf(launcher: Launcher) -> dict[str, str]:
    """The variables of an LSF job whose jsrun is the stand-in."""
    environment = launcher.environment()
    python = next(folder for folder in environment["PATH"].split(":") if (Path(folder) / "python").exists())
    program = launcher.folder / "bin" / "jsrun"
    program.parent.mkdir()
    program.write_text(JSRUN.format(python=f"{python}/python"))
    program.chmod(0o755)
    (launcher.folder / "rank.py").write_text(RANK)
    return {**LSF, "PATH": f"{program.parent}:{environment['PATH']}"}


@pytest.mark.parametrize("words", [["--jsrun"], ["--jsrun", "-np", "3"], []], ids=["asked", "with -np", "by default"])
def test_jsrun_starts_a_rank_on_every_slot(launcher: Launcher, lsf: dict[str, str], words: list[str]) -> None:
    done = launcher.run(*words, "python", "rank.py", **lsf)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, EXPECTED), done.stderr
    assert (launcher.folder / "words").read_text().splitlines()[2:] == ["python", "rank.py"]
    assert len(re.findall("^rank: ", (launcher.folder / "ranks.erf").read_text(), re.MULTILINE)) == 3


def test_arguments_for_jsrun_reach_it_without_a_notice(launcher: Launcher, lsf: dict[str, str]) -> None:
    program = launcher.folder / "bin" / "jsrun"
    program.write_text('#!/bin/sh\necho jsrun "$@"\n')
    done = launcher.run("--binding-args=-n 4 -a 1", "--mpi-args=-x", "true", **lsf)
    assert (done.returncode, done.stdout, done.stderr) == (0, "jsrun -n 4 -a 1 --smpiargs -x true\n", "")


def test_a_dry_run_shows_the_command_and_starts_nothing(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--dry-run", "--jsrun", "python", "rank.py", **lsf)
    assert done.returncode == 0, done.stderr
    assert re.search(r"3 ranks by jsrun: jsrun --erf_input .+ python rank.py$", done.stdout, re.MULTILINE)
    assert len(re.findall("^rank: ", done.stdout, re.MULTILINE)) == 3
    assert not (launcher.folder / "words").exists()


def test_gloo_still_means_this_launcher(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--gloo", "-np", "1", "sh", "-c", "echo $HOROVOD_RANK $HOROVOD_HOSTNAME", **lsf)
    assert done.stdout == "[0]<stdout>:0 localhost\n" and not (launcher.folder / "words").exists()


def test_a_rank_that_fails_is_named(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--jsrun", "python", "rank.py", "fail", **lsf)
    assert done.returncode == 1
    assert "horovodrun: the job failed: jsrun ended with exit code 1.\nRank 1 failed first. Reason: " in done.stderr
    assert "bad luck" in done.stderr


def test_a_signal_ends_jsrun_and_all_ranks(launcher: Launcher, lsf: dict[str, str]) -> None:
    process = launcher.start("--jsrun", "sh", "-c", "echo ready; sleep 1000", **lsf)
    launcher.await_line(process, "ready", times=3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 143 and errors.endswith("horovodrun: ended by SIGTERM\n")


def test_the_secret_is_in_no_file_and_on_no_command_line(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--jsrun", "sh", "-c", "echo $_HOROVOD_SECRET_KEY; tr '\\0' ' ' < /proc/$PPID/cmdline", **lsf)
    (secret,) = {line for line in done.stdout.splitlines() if len(line) == 44}
    assert done.stdout.count(secret) == 3
    written = "".join((launcher.folder / name).read_text() for name in ("words", "ranks.erf"))
    assert secret not in written


def test_a_function_runs_on_all_ranks(launcher: Launcher, lsf: dict[str, str]) -> None:
    program = "import horovod; print(horovod.run(lambda x: x + 1, args=(1,), num_proc=3))"
    process = launcher.python("-c", program, **lsf)
    out, errors = process.communicate(timeout=SOON)
    assert out.splitlines()[-1] == "[2, 2, 2]", errors


def test_outside_of_lsf_jsrun_is_refused(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--jsrun", "-np", "2", "true", PATH=lsf["PATH"])
    assert done.returncode == 2 and "Horovod did not detect an LSF job" in done.stderr


def test_standard_input_is_refused(launcher: Launcher, lsf: dict[str, str]) -> None:
    done = launcher.run("--jsrun", "--stdin", "0", "true", **lsf)
    assert done.returncode == 2 and "--stdin is not supported with --jsrun" in done.stderr


def test_an_lsf_job_without_jsrun_is_told(launcher: Launcher) -> None:
    done = launcher.run("--jsrun", "true", **LSF)
    assert done.returncode == 2 and "there is no jsrun on the PATH" in done.stderr
