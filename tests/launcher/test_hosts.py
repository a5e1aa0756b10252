"""Ranks on other hosts, which here are agents of their own on this machine: a stand-in for ssh starts them.

What needs networks that fail and a real ssh is in ``tests/cluster``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from shlex import quote

import psutil
import pytest

import horovod
from launcher.harness import LIMIT_SECONDS, Launcher, finish

SHOW = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE" + (
    " $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME"
)
WAIT = "echo ready; sleep 1000"
STAND_IN = """#!/bin/bash
{before}
if [ -n "$SSH_LOG" ]; then printf '%s\\n' "$@" >> "$SSH_LOG"; fi
exec /bin/sh -c "${{@: -1}}"
"""


@pytest.fixture
def ssh(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``horovodrun`` runs instead of ssh, for the length of a test."""
    path = launcher.folder / "ssh-stand-in"
    write(path)
    monkeypatch.setenv("LAUNCHER_SSH", str(path))
    return path


def write(path: Path, before: str = "") -> None:
    path.write_text(STAND_IN.format(before=before))
    path.chmod(0o755)


def start(launcher: Launcher, ssh: Path, *words: str | Path, **extra: str) -> subprocess.Popen[str]:
    return launcher.start(*words, HOROVOD_SSH_COMMAND=quote(str(ssh)), **extra)


def run(launcher: Launcher, ssh: Path, *words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return finish(start(launcher, ssh, *words, **extra))


def words(text: str) -> list[str]:
    return sorted(line.partition(":")[2] for line in text.splitlines())


@pytest.mark.parametrize("first", ["alpha", "localhost"])
def test_ranks_know_their_places_on_every_host(launcher: Launcher, ssh: Path, first: str) -> None:
    done = run(launcher, ssh, "-np", "3", "-H", f"{first}:2,beta:2", "sh", "-c", SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    assert words(done.stdout) == [f"0/3 0/2 0/2 {first}", f"1/3 1/2 0/1 {first}", "2/3 0/1 1/2 beta"]


SUM = """
import numpy
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common.basics import cross_size, init, rank
from horovod.core.submission import collectives
from horovod.core.requests.tensor import Tensor
init()
values, result = numpy.arange(5, dtype=numpy.float32) * (rank() + 1), numpy.empty(5, numpy.float32)
source, target = (Tensor(array, DataType.FLOAT32, (5,)) for array in (values, result))
collectives.allreduce("allreduce", "sum", [source], [target], ReduceOp.SUM, awaited=True).wait()
print(result.tolist(), cross_size())
"""
"""Without a framework, whose import takes most of a rank's time."""


@pytest.mark.parametrize("hosts", ["alpha:2,beta:1", "localhost:1,beta:2", "alpha:1,beta:1,gamma:1"])
def test_ranks_of_all_hosts_compute_together(launcher: Launcher, ssh: Path, hosts: str) -> None:
    done = run(launcher, ssh, "-np", "3", "-H", hosts, "python", "-c", SUM)
    assert done.returncode == 0, done.stderr
    sums = [line.rpartition(" ")[0] for line in words(done.stdout)]
    assert sums == ["[0.0, 6.0, 12.0, 18.0, 24.0]"] * 3


def test_a_function_runs_on_every_host(launcher: Launcher, ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher.environment(HOROVOD_SSH_COMMAND=quote(str(ssh))).items():
        monkeypatch.setenv(name, value)
    offset = 10
    found = horovod.run(
        lambda: (os.environ["HOROVOD_HOSTNAME"], int(os.environ["HOROVOD_RANK"]) + offset),
        num_proc=3,
        hosts="alpha:2,beta:2",
    )
    assert found == [("alpha", 10), ("alpha", 11), ("beta", 12)]


def test_the_secret_is_on_no_command_line(launcher: Launcher, ssh: Path) -> None:
    log = launcher.folder / "log"
    program = "echo $_HOROVOD_SECRET_KEY; cat /proc/*/cmdline | tr '\\0' ' ' | grep -c -F \"$_HOROVOD_SECRET_KEY\""
    # grep's own command line holds what it looks for: its shell finds it once, or twice where two ranks look at once.
    done = run(launcher, ssh, "-np", "1", "-H", "beta:1", "sh", "-c", program, SSH_LOG=str(log))
    secret, count = (line.partition(":")[2] for line in done.stdout.splitlines())
    assert len(secret) == 44 and int(count) <= 1
    assert secret not in log.read_text()


def test_what_is_of_the_launchers_host_alone_stays_there(launcher: Launcher, ssh: Path) -> None:
    show = "echo $MINE,$CUDA_VISIBLE_DEVICES,$HOME,$PWD,$OMP_NUM_THREADS"
    write(ssh, "export HOME=/theirs; unset CUDA_VISIBLE_DEVICES MINE")
    done = run(launcher, ssh, "-np", "1", "-H", "b:1", "sh", "-c", show, MINE="yes", CUDA_VISIBLE_DEVICES="2")
    (line,) = words(done.stdout)
    assert line == f"yes,,/theirs,{launcher.folder},{os.cpu_count()}" or "quota" in line


def test_what_a_login_shell_prints_is_skipped(launcher: Launcher, ssh: Path) -> None:
    write(ssh, "echo Welcome to this fine host; echo 'motd' >&2")
    done = run(launcher, ssh, "-np", "2", "-H", "alpha:1,beta:1", "sh", "-c", "echo here")
    assert (done.returncode, done.stdout.count("here"), "Welcome" in done.stdout + done.stderr) == (0, 2, False)


def test_hosts_that_cannot_take_part_say_why_and_nothing_starts(launcher: Launcher, ssh: Path) -> None:
    """Each host has a trouble of its own; those before, between and after them have none."""
    troubles = {
        "refused": "echo Connection refused >&2; exit 255",
        "locked": "echo 'root@b: Permission denied (publickey).' >&2; exit 255",
        "far": "echo 'ssh: connect to host b port 22: No route to host' >&2; exit 255",
        "strange": "echo 'Host key verification failed.' >&2; exit 255",
        "closed": "echo Account closed; exit 1",
        "bare": "PYTHONPATH=; set -- 'exec python3 -S -c \"import horovod\"'",
        "dumb": "cd /; sleep 1000",
    }
    messages = {
        "refused": "nothing listens at its ssh port: does sshd run there",
        "locked": "it does not accept the key",
        "far": "there is no route to it",
        "strange": "its host key is not trusted",
        "closed": "its login shell wrote: Account closed",
        "bare": "Horovod is not installed for its Python",
        "dumb": "it has not answered within 4 seconds",
    }
    cases = "\n".join(f'*" {host} "*) {before};;' for host, before in troubles.items())
    write(ssh, f'case "$*" in\n{cases}\nesac')
    marker = launcher.folder / "started"
    hosts = ",".join(f"{host}:1" for host in ("good", *troubles, "fine"))
    done = run(launcher, ssh, "--start-timeout", "4", "-np", "9", "-H", hosts, "touch", marker)
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert first == "horovodrun: error: 7 of 9 hosts cannot take part in this job:"
    for line, (host, message) in zip(lines, messages.items(), strict=True):
        assert line.startswith(f"  {host} ") and message in line
    assert not marker.exists()


def test_a_host_without_the_working_directory_says_so(launcher: Launcher, ssh: Path) -> None:
    folder = launcher.folder / "here"
    folder.mkdir()
    write(ssh, f"cd / && rmdir {quote(str(folder))}")
    launcher.folder = folder
    done = run(launcher, ssh, "-np", "1", "-H", "b:1", "true")
    assert done.returncode == 1
    assert (
        f"the launcher's working directory {folder} cannot be entered there: No such file or directory" in done.stderr
    )


def test_ranks_run_where_the_user_says_they_are(launcher: Launcher, ssh: Path) -> None:
    (launcher.folder / "real").mkdir()
    (launcher.folder / "link").symlink_to("real")
    launcher.folder = launcher.folder / "link"  # as a home that is mounted elsewhere on every host
    done = run(launcher, ssh, "-np", "1", "-H", "b:1", "sh", "-c", 'echo "$PWD"', PWD=str(launcher.folder))
    assert words(done.stdout) == [str(launcher.folder)]
    done = run(launcher, ssh, "-np", "1", "-H", "b:1", "sh", "-c", 'echo "$PWD"', PWD="/usr")
    assert words(done.stdout) == [str(launcher.folder.resolve())]


def test_another_version_says_so(launcher: Launcher, ssh: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import horovod._base.version as own\nown.VERSION = '0.28.1+pure.0'\n")
    path = launcher.environment()["PYTHONPATH"]
    (tmp_path / "sed").write_text(f"s,{path},{quote(str(tmp_path))}:{path},")
    write(ssh, f'set -- "$(echo "${{@: -1}}" | sed -f {quote(str(tmp_path / "sed"))})"')
    done = run(launcher, ssh, "-np", "1", "-H", "b:1", "true")
    assert "it has version 0.28.1+pure.0 of Horovod" in done.stderr and "install the same on both" in done.stderr


def test_a_command_that_is_not_there_says_where(launcher: Launcher, ssh: Path) -> None:
    done = run(launcher, ssh, "-np", "2", "-H", "alpha:1,beta:1", "no-such-program")
    assert done.returncode == 1
    which = re.fullmatch(
        r"horovodrun: error: host (alpha|beta): cannot start rank [01] \(no-such-program\): command not found",
        done.stderr.strip(),
    )
    assert which, done.stderr


def test_a_rank_that_fails_ends_all_hosts_and_is_named(launcher: Launcher, ssh: Path) -> None:
    program = f"if [ $HOROVOD_RANK = 2 ]; then echo bad luck >&2; exit 7; fi; {WAIT}"
    done = run(launcher, ssh, "-np", "3", "-H", "alpha:2,beta:1", "sh", "-c", program)
    assert done.returncode == 7
    assert "[2]<stderr>:bad luck\n" in done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("[")] == [
        "horovodrun: Process 2 exit with status code 7. Terminating the 2 ranks that still run.",
        "horovodrun: the end of rank 2's stderr:",
        "    bad luck",
        "horovodrun: the job failed. Rank 2 failed first (beta, local rank 0).",
        "Process name: 2",
        "Exit code: 7",
    ]


def agents(launcher: Launcher) -> list[int]:
    lines = launcher.living().items()
    return sorted(number for number, line in lines if "agent.program" in line and "/bin/sh" not in line)


def test_an_agent_that_is_killed_is_named_and_leaves_nothing(launcher: Launcher, ssh: Path) -> None:
    process = start(launcher, ssh, "-np", "2", "-H", "localhost:1,beta:1", "sh", "-c", WAIT)
    launcher.await_line(process, "ready", times=2)
    (agent,) = agents(launcher)
    os.kill(agent, signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 255
    assert "Rank 1 failed first (beta, local rank 0)." in done.stderr
    assert "Reason: the agent of beta is lost: ssh was killed by SIGKILL" in done.stderr
    launcher.await_nothing()


def test_an_agent_that_does_not_answer_does_not_hold_up_the_end(launcher: Launcher, ssh: Path) -> None:
    program = f"if [ $HOROVOD_RANK = 0 ]; then until [ -e stopped ]; do sleep 0.02; done; exit 3; fi; {WAIT}"
    process = start(launcher, ssh, "-np", "2", "-H", "localhost:1,beta:1", "sh", "-c", program)
    launcher.await_line(process, "ready")
    (agent,) = agents(launcher)
    os.kill(agent, signal.SIGSTOP)
    (launcher.folder / "stopped").touch()
    done = finish(process)
    assert done.returncode == 3
    assert "Rank 0 failed first (localhost, local rank 0)." in done.stderr
    assert "horovodrun: beta did not confirm that the job has ended there" in done.stderr
    launcher.await_nothing()


def test_a_killed_launcher_leaves_nothing_on_any_host(launcher: Launcher, ssh: Path) -> None:
    process = start(launcher, ssh, "-np", "3", "-H", "localhost:1,alpha:1,beta:1", "sh", "-c", WAIT)
    launcher.await_line(process, "ready", times=3)
    process.kill()
    launcher.await_nothing()


def test_ctrl_c_ends_all_hosts(launcher: Launcher, ssh: Path) -> None:
    process = start(
        launcher, ssh, "-np", "2", "-H", "alpha:1,beta:1", "sh", "-c", "trap 'echo bye; exit' TERM; " + WAIT + " & wait"
    )
    launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stdout.count("bye")) == (130, 2)
    assert done.stderr.splitlines() == ["horovodrun: SIGINT: ending the job", "horovodrun: ended by SIGINT"]


def test_a_second_ctrl_c_kills_all_hosts_at_once(launcher: Launcher, ssh: Path) -> None:
    stubborn = "trap '' TERM INT HUP; echo ready; while :; do sleep 1; done"
    process = start(launcher, ssh, "-np", "2", "-H", "alpha:1,beta:1", "sh", "-c", stubborn)
    launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130 and "killed the job" in done.stderr
    launcher.await_nothing()


def test_ctrl_c_while_hosts_are_being_reached_ends_everything(launcher: Launcher, ssh: Path) -> None:
    write(ssh, "echo reached >> reached; sleep 1000")
    process = start(launcher, ssh, "-np", "1", "-H", "beta:1", "true")
    while not (launcher.folder / "reached").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130


def test_output_of_a_rank_elsewhere_waits_for_its_reader(launcher: Launcher, ssh: Path) -> None:
    process = start(
        launcher,
        ssh,
        "-np",
        "1",
        "-H",
        "beta:1",
        "sh",
        "-c",
        "head -c 30000000 /dev/zero | tr '\\0' x | fold -w 1000; echo; echo end",
    )
    time.sleep(1)  # nobody reads meanwhile
    done = finish(process)
    assert (done.returncode, done.stdout.count("x")) == (0, 30_000_000) and done.stdout.endswith("end\n")


def test_a_rank_that_writes_more_than_anybody_reads_fills_no_memory(launcher: Launcher, ssh: Path) -> None:
    process = start(launcher, ssh, "-np", "1", "-H", "beta:1", "yes", "x" * 100)
    launcher.await_line(process, "x")
    time.sleep(1.5)  # yes writes a gigabyte in this time, if it may
    largest = max(psutil.Process(pid).memory_info().rss for pid in launcher.living())
    process.terminate()
    assert process.wait(LIMIT_SECONDS) == 143
    assert largest < 300 << 20


def test_standard_input_reaches_a_rank_elsewhere(launcher: Launcher, ssh: Path) -> None:
    process = start(launcher, ssh, "--stdin", "1", "-np", "2", "-H", "alpha:1,beta:1", "sh", "-c", "wc -c")
    out, _ = process.communicate("x" * 3_000_000, timeout=LIMIT_SECONDS)
    assert words(out) == ["0", "3000000"]


def test_flags_of_ssh_reach_ssh(launcher: Launcher, ssh: Path) -> None:
    log = launcher.folder / "log"
    done = run(
        launcher, ssh, "-p", "2222", "-i", "key", "-np", "1", "-H", "me@beta:1", "sh", "-c", "echo $HOROVOD_HOSTNAME",
        SSH_LOG=str(log),
    )  # fmt: skip
    given = log.read_text().splitlines()
    assert (done.stderr, words(done.stdout)) == ("", ["beta"])
    assert given[given.index("-p") + 1] == "2222" and given[given.index("-i") + 1] == "key" and "me@beta" in given


def test_each_host_uses_the_interfaces_that_it_has(launcher: Launcher, ssh: Path) -> None:
    show = "echo $HOROVOD_GLOO_IFACE $_HOROVOD_NETWORK_INTERFACES $NCCL_SOCKET_IFNAME"
    done = run(launcher, ssh, "--network-interfaces", "none0,lo", "-np", "1", "-H", "beta:1", "sh", "-c", show)
    assert (done.returncode, words(done.stdout)) == (0, ["lo lo lo"])
    done = run(launcher, ssh, "--network-interfaces", "none0", "-np", "1", "-H", "beta:1", "sh", "-c", show)
    assert done.returncode == 1 and "none of the network interfaces none0" in done.stderr
