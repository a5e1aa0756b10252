"""Jobs that are stopped for longer than their limits, and go on: as a whole, and the launcher alone. A rank alone is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from launcher.harness import RUN_SECONDS, Launcher, last_words
from time_limits import of_starts

LIMIT = max(5, round(of_starts(10)))
"""Seconds after which a rank that is missing, or stopped, ends the job: many times what the job needs on a busy machine."""
SETTINGS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT),
    "HOROVOD_START_TIMEOUT": str(2 * LIMIT),
}
SCRIPT = """
import os, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.core.submission import collectives

if "late" in sys.argv and os.environ["HOROVOD_RANK"] != "1":
    Path("comes" + os.environ["HOROVOD_RANK"]).touch()
elif "late" in sys.argv:
    for _ in range(6000):  # a minute: until the others have begun
        if Path("comes0").exists() and Path("comes2").exists():
            break
        time.sleep(0.01)
    time.sleep(1)  # they have no sign for it that they wait at the server
    print("began", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)
basics.init()
if basics.rank() == 1:
    while not Path("wait").exists():
        time.sleep(0.01)
    print("x" * (1 << 20) if "writes" in sys.argv else "waits", flush=True)  # waits while nobody reads so much
    while not Path("go").exists():
        time.sleep(0.01)
elif basics.rank() == 0 and "late" not in sys.argv:
    print("began", flush=True)
collectives.barrier().wait()
print("done", flush=True)
"""


def start(launcher: Launcher, *arguments: str) -> subprocess.Popen[str]:
    (launcher.folder / "train.py").write_text(SCRIPT)
    job = launcher.start("-np", "3", "python", "train.py", *arguments, **SETTINGS)
    launcher.await_line(job, "began")
    return job


def send(processes: Collection[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


def end(launcher: Launcher, job: subprocess.Popen[str]) -> tuple[int, str, str]:
    time.sleep(1)  # for those that would take the stop for a stall
    (launcher.folder / "go").touch()
    out, err = job.communicate(timeout=RUN_SECONDS)
    return job.returncode, out, err


def test_a_job_that_is_stopped_as_a_whole_goes_on(launcher: Launcher) -> None:
    job = start(launcher)
    (launcher.folder / "wait").touch()
    launcher.await_line(job, "waits")
    everybody = launcher.living()
    send(everybody, signal.SIGSTOP)
    time.sleep(LIMIT * 2)
    send(everybody, signal.SIGCONT)
    status, out, err = end(launcher, job)
    assert (status, out.count("done")) == (0, 3), err


def test_a_job_that_is_stopped_as_a_whole_while_ranks_meet_goes_on(launcher: Launcher) -> None:
    job = start(launcher, "late")
    (launcher.folder / "wait").touch()
    everybody = launcher.living()
    send(everybody, signal.SIGSTOP)
    time.sleep(LIMIT * 3)
    send(everybody, signal.SIGCONT)
    status, out, err = end(launcher, job)
    assert (status, out.count("done")) == (0, 3), err


def test_a_job_whose_launcher_alone_is_stopped_goes_on(launcher: Launcher) -> None:
    """A rank waits meanwhile until somebody reads what it writes, and the others wait for it."""
    job = start(launcher, "writes")
    send([job.pid], signal.SIGSTOP)
    (launcher.folder / "wait").touch()
    time.sleep(LIMIT * 2)
    send([job.pid], signal.SIGCONT)
    status, out, err = end(launcher, job)
    assert (status, out.count("done")) == (0, 3), err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_alone_is_lost(launcher: Launcher, rank: int) -> None:
    job = start(launcher)
    (launcher.folder / "wait").touch()
    launcher.await_line(job, "waits")
    (pid,) = [pid for pid, environment in environments(launcher).items() if f"HOROVOD_RANK={rank}" in environment]
    send([pid], signal.SIGSTOP)
    _, err = job.communicate(timeout=RUN_SECONDS)
    assert job.returncode != 0
    assert f"Rank {rank} failed first" in err and "stopped" in err
    assert last_words(err).startswith("Exit code: "), err


def environments(launcher: Launcher) -> dict[int, list[str]]:
    """The environment of each process of the job."""
    return {pid: Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0") for pid in launcher.living()}
