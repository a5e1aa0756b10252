"""What this process sees of others: real ones, in every state they can be in."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod.control.lost_rank import stopped_rank
from horovod.control.processes import KILLED, STOPPED, own_process_namespace, why_not_running
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as made:
        yield made
        made.kill()


def test_a_process_that_runs(process: subprocess.Popen[bytes]) -> None:
    assert why_not_running(os.getpid()) == ""
    assert why_not_running(process.pid) == ""


def test_a_process_that_is_stopped_and_goes_on(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: why_not_running(process.pid) == STOPPED, "the stop")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: why_not_running(process.pid) == "", "the end of the stop")


def test_the_stopped_one_of_several_processes(process: subprocess.Popen[bytes]) -> None:
    here = own_process_namespace()
    processes = [(here, os.getpid()), (here, os.getppid()), (here, process.pid), ("elsewhere", process.pid)]
    assert stopped_rank(0, processes, suspect=1) == -1
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: why_not_running(process.pid) == STOPPED, "the stop")
    assert stopped_rank(0, processes, suspect=1) == 2
    assert stopped_rank(3, processes, suspect=1) == 3
    assert stopped_rank(0, [("", os.getpid()), ("", process.pid)], suspect=1) == -1


def test_a_process_that_is_gone(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    wait_until(lambda: why_not_running(process.pid) == KILLED, "the end")  # nobody has asked for its status yet
    process.wait()
    assert why_not_running(process.pid) == KILLED


def test_a_process_that_a_debugger_holds_up_runs(process: subprocess.Popen[bytes]) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    if ptrace(PTRACE_ATTACH, process.pid, None, None):
        pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "t"
    assert why_not_running(process.pid) == ""
    ptrace(PTRACE_DETACH, process.pid, None, None)


def test_a_process_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert why_not_running(os.getpid()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not known to see each other")
def test_processes_of_one_namespace_have_the_same_sight() -> None:
    code = "from horovod.control.processes import own_process_namespace; print(own_process_namespace())"
    here = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SOON)
    assert here.stdout.strip() == own_process_namespace() != ""
    apart = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    if apart.stderr.startswith("unshare:"):
        pytest.skip(f"no namespace can be made here: {apart.stderr.strip()}")
    assert apart.stdout.strip() not in ("", own_process_namespace())
