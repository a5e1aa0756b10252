"""However a job ends, it says why, exits as it should and leaves no process behind.

The fixture checks the last part for every test: ``launcher`` fails if a process with its tag is still alive.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher, finish

STUBBORN = "trap '' TERM INT HUP; echo ready; while :; do sleep 1; done"
"""A shell command that ends by SIGKILL only."""


def seconds_to_end(process: subprocess.Popen[str]) -> tuple[float, str]:
    start = time.monotonic()
    err = finish(process).stderr
    return time.monotonic() - start, err


ENDINGS = [
    ("exit 3", 3, "Exit code: 3"),
    ("exit 255", 255, "Exit code: 255"),
    ("kill -SEGV $$", 139, "Exit code: 139 (killed by SIGSEGV)"),
    ("kill -KILL $$", 137, "Exit code: 137 (killed by SIGKILL)"),
]


def test_the_exit_code_is_the_failing_ranks(launcher: Launcher) -> None:
    jobs = [  # all at once: each lasts for as long as the other ranks may take to end
        launcher.start("-np", "2", "sh", "-c", f"if [ $HOROVOD_RANK = 1 ]; then {program}; fi; sleep 1000")
        for program, _, _ in ENDINGS
    ]
    for job, (_, status, words) in zip(jobs, ENDINGS, strict=True):
        done = finish(job)
        assert done.returncode == status
        assert f"Process 1 exit with status code {status}" in done.stderr
        assert "Rank 1 failed first (localhost, local rank 1)" in done.stderr
        assert "Process name: 1" in done.stderr
        assert words in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/no/such/interpreter\n", "the interpreter that its first line names does not exist"),
        ("echo hello\n", "a script without a first line such as #!/bin/sh"),
    ],
)
def test_a_file_that_cannot_run_says_why(launcher: Launcher, tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "script"
    script.write_text(text)
    script.chmod(0o755)
    done = launcher.run("-np", "2", script)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"horovodrun: error: cannot start rank 0 ({script}): ") and message in line


def test_a_failure_ends_even_stubborn_ranks_and_shows_the_end_of_stderr(launcher: Launcher) -> None:
    failing = "for i in $(seq 30); do echo line $i >&2; done; sleep 0.5; exit 9"
    process = launcher.start("-np", "3", "sh", "-c", f"if [ $HOROVOD_RANK = 2 ]; then {failing}; fi; {STUBBORN}")
    launcher.await_line(process, "ready")
    seconds, err = seconds_to_end(process)
    assert process.returncode == 9
    assert seconds < LIMIT_SECONDS
    tail = err[err.index("the end of rank 2's stderr") :]
    assert "    line 30\n" in tail and "    line 11\n" in tail and "    line 10\n" not in tail


def test_ranks_that_still_run_may_say_what_they_saw(launcher: Launcher, tmp_path: Path) -> None:
    written = quote(str(tmp_path / "process"))
    failing = f"echo $$ > {written}.new; mv {written}.new {written}; sleep 0.2; kill -KILL $$"
    await_end = f"while ! grep -q State:.Z /proc/$(cat {written})/status; do sleep 0.02; done"
    seeing = f"until [ -s {written} ]; do sleep 0.02; done; {await_end}"
    program = f"if [ $HOROVOD_RANK = 1 ]; then {failing}; fi; {seeing}; echo rank 1 is gone >&2; exit 1"
    done = launcher.run("-np", "2", "sh", "-c", program)
    assert done.returncode == 137
    assert "[0]<stderr>:rank 1 is gone" in done.stderr
    assert "Rank 1 failed first" in done.stderr


def test_a_rank_that_does_well_may_end_before_the_others(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "sh", "-c", "if [ $HOROVOD_RANK = 1 ]; then sleep 1; echo late; fi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1]<stdout>:late\n", "")


ACCUSE = """
import os, sys, time
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.secret import decode_secret
rank, ending = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
if rank == 0:
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with RendezvousClient(address, decode_secret(os.environ["_HOROVOD_SECRET_KEY"]), 10) as client:
        client.put("failure", b'{"rank": 1, "reason": "rank 1 left"}')
    sys.exit(5)
time.sleep({"late": 0.4, "never": 60}[ending])
sys.exit(7)
"""


def test_the_guilty_rank_is_named_though_its_victim_ended_first(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "python", "-c", ACCUSE, "late")
    assert done.returncode == 7
    assert "Rank 1 failed first" in done.stderr
    assert "Reason: rank 1 left" in done.stderr


def test_a_guilty_rank_that_hangs_is_named_and_the_exit_code_is_its_victims(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "python", "-c", ACCUSE, "never")
    assert done.returncode == 5
    assert "Process 0 exit with status code 5. Rank 1 failed first." in done.stderr
    assert "Process name: 1\nExit code: 5, which is that of rank 0" in done.stderr


def test_every_exit_status_that_the_documents_list(launcher: Launcher, tmp_path: Path) -> None:
    """Each row of the table in docs/operations.md: a job that ends so, its status, and what the row says of it."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
    section = text.split("## Exit statuses of horovodrun\n")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:])
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\nexec /bin/sh -c "${@: -1}"\n')
    ssh.chmod(0o755)

    def job(*words: str, **extra: str) -> subprocess.Popen[str]:
        return launcher.start("-np", "2", *words, **extra)

    def on_rank_1(program: str, before: tuple[str, ...] = (), **extra: str) -> subprocess.Popen[str]:
        return job(*before, "sh", "-c", f"if [ $HOROVOD_RANK = 1 ]; then {program}; fi; sleep 1000", **extra)

    interrupted, unread = job("sh", "-c", "echo ready; sleep 1000"), job("yes")
    jobs = {
        "all ranks have ended with 0": (job("true"), 0, "0"),
        "a rank has ended with a status other than 0": (on_rank_1("exit 7"), 7, "that status"),
        "a rank was ended by a signal": (on_rank_1("kill -KILL $$"), 137, r"128 \+ .*: 137 for SIGKILL"),
        "the rank that failed first does not end by itself": (
            job("python", "-c", ACCUSE, "never"), 5, "that of the first rank that failed because of it"
        ),
        "a signal has ended `horovodrun`": (interrupted, 143, r"128 \+ .* 143 for SIGTERM"),
        "the reader of its output has gone": (unread, 141, "141"),
        "a host cannot take part": (job("-H", "beta:2", "true", HOROVOD_SSH_COMMAND="false"), 1, "1"),
        "the command line or the configuration is wrong": (job("--no-such-flag", "true"), 2, "2"),
        "the agent of a host is lost": (
            on_rank_1("kill -KILL $PPID", ("-H", "localhost:1,beta:1"), HOROVOD_SSH_COMMAND=quote(str(ssh))), 255, "255"
        ),
    }  # fmt: skip
    launcher.await_line(interrupted, "ready")
    interrupted.terminate()
    assert unread.stdout is not None
    launcher.await_line(unread, "y")
    unread.stdout.close()
    assert len(told) == len(jobs)
    for begin, (process, status, words) in jobs.items():
        (row,) = [each for each in told if each.startswith(begin)]
        assert re.match(words, told[row]), row
        assert process.wait(LIMIT_SECONDS) == status, row


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_job(launcher: Launcher, number: signal.Signals) -> None:
    process = launcher.start("-np", "2", "sh", "-c", "sleep 1000 & echo ready; sleep 1000")
    launcher.await_line(process, "ready")
    process.send_signal(number)
    seconds, err = seconds_to_end(process)
    assert process.returncode == 128 + number
    assert seconds < LIMIT_SECONDS
    assert err.splitlines()[-1] == f"horovodrun: ended by {number.name}"


def test_a_signal_ends_stubborn_ranks_after_a_grace(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", STUBBORN)
    launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    seconds, _ = seconds_to_end(process)
    assert process.returncode == 130
    assert seconds < LIMIT_SECONDS


def test_a_second_ctrl_c_kills_at_once(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", STUBBORN)
    launcher.await_line(process, "ready", times=2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    seconds, err = seconds_to_end(process)
    assert process.returncode == 130
    assert seconds < LIMIT_SECONDS
    assert "killed the job" in err


CTRL_C_AT = """
import atexit, os, signal, sys
from horovod.runner import launch, signals

def ctrl_c(kill=os.kill, number=signal.SIGINT, pid=os.getpid()):
    kill(pid, number)

class Last:
    def __del__(self, ctrl_c=ctrl_c):
        ctrl_c()

class Pipe(signals.SignalPipe):
    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        ctrl_c()

moment = sys.argv.pop(1)
if moment == "after the job":
    launch.SignalPipe = Pipe
elif moment == "in atexit":
    atexit.register(ctrl_c)
elif moment == "last":
    last = Last()  # when modules are cleared
status = launch.main()
if moment == "after main":
    ctrl_c()
sys.exit(status)
"""


@pytest.mark.parametrize("moment", ["after the job", "after main", "in atexit", "last"])
def test_a_second_ctrl_c_changes_no_exit_status(launcher: Launcher, moment: str) -> None:
    process = launcher.python("-c", CTRL_C_AT, moment, "-np", "1", "sh", "-c", "echo ready; sleep 1000")
    launcher.await_line(process, "ready")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "horovodrun: ended by SIGINT"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_reader_who_does_not_read_holds_up_no_signal(launcher: Launcher, signals: int) -> None:
    process = launcher.start("-np", "2", "yes")
    launcher.await_line(process, "y")
    time.sleep(0.5)  # now the pipe is full, and the launcher waits for us
    for _ in range(signals):
        process.terminate()
        time.sleep(0.4)  # longer than what counts as one signal twice
    assert process.wait(LIMIT_SECONDS) == 143


def test_ranks_may_say_goodbye(launcher: Launcher) -> None:
    farewell = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    process = launcher.start("-np", "2", "sh", "-c", farewell)
    launcher.await_line(process, "ready", times=2)
    process.terminate()
    done = finish(process)
    assert done.returncode == 143
    assert done.stdout.count("saved") == 2


def test_a_hangup_that_was_ignored_stays_ignored(launcher: Launcher) -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from horovod.runner.launch import main; sys.exit(main())"
    )
    process = launcher.python("-c", program, "-np", "1", "sh", "-c", "echo ready; sleep 1; echo survived")
    launcher.await_line(process, "ready")
    process.send_signal(signal.SIGHUP)
    assert "survived" in finish(process).stdout
    assert process.returncode == 0


WANDERERS = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"]
subprocess.Popen(sleep)                                # as DataLoader workers are
subprocess.Popen(sleep, start_new_session=True)        # out of the rank's session
if os.fork() == 0:                                     # out of its session, and an orphan
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""


def test_a_killed_launcher_leaves_nothing(launcher: Launcher) -> None:
    program = WANDERERS + "print('ready'); time.sleep(1000)"
    process = launcher.start("-np", "2", "python", "-c", program)
    launcher.await_line(process, "ready", times=2)
    launcher.await_living(2 + 2 * 4)  # launcher and guardian; two ranks with three wanderers each
    process.kill()
    launcher.await_nothing()


def test_a_failed_job_leaves_none_of_its_ranks_children(launcher: Launcher) -> None:
    program = WANDERERS + "print('ready'); time.sleep(0.5 if os.environ['HOROVOD_RANK'] == '1' else 60); sys.exit(4)"
    process = launcher.start("-np", "2", "python", "-c", program)
    launcher.await_line(process, "ready")
    seconds, _ = seconds_to_end(process)
    assert process.returncode == 4
    assert seconds < LIMIT_SECONDS
    assert launcher.living() == {}


def test_stubborn_ranks_and_what_they_have_started_are_ended(launcher: Launcher) -> None:
    stray = f'setsid sh -c "{STUBBORN}" > /dev/null 2>&1 &'
    jobs = [  # at the same time: each takes a grace
        launcher.start("-np", "2", "sh", "-c", program)
        for program in (
            f"if [ $HOROVOD_RANK = 1 ]; then sleep 0.5; exit 4; fi; {stray} {STUBBORN}",
            f"{stray} sleep 0.3; exit 4",  # the strays outlive all ranks
        )
    ]
    assert [finish(job).returncode for job in jobs] == [4, 4]
    assert launcher.living() == {}


def test_a_child_that_holds_the_output_does_not_hold_the_job(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", "sleep 1000 & echo done")
    seconds, _ = seconds_to_end(process)
    assert process.returncode == 0
    assert seconds < LIMIT_SECONDS
    assert launcher.living() == {}


def test_a_stopped_rank_is_ended_too(launcher: Launcher) -> None:
    stopped = "if [ $HOROVOD_RANK = 0 ]; then kill -STOP $$; fi; sleep 0.5; exit 6"
    process = launcher.start("-np", "2", "sh", "-c", stopped)
    seconds, _ = seconds_to_end(process)
    assert process.returncode == 6
    assert seconds < LIMIT_SECONDS


def test_the_job_outlives_its_guardian(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "sh", "-c", "echo ready; sleep 1; echo still here")
    launcher.await_line(process, "ready")
    (guardian,) = [number for number, line in launcher.living().items() if "guardian_process" in line]
    os.kill(guardian, signal.SIGKILL)
    done = finish(process)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:still here\n")
