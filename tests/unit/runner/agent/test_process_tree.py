"""Finding and ending every process of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from horovod.runner.agent import process_tree

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(program: str, mark: str = "") -> subprocess.Popen[bytes]:
    environment = {**os.environ, **({"MARK": mark} if mark else {})}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_members_are_found_by_session_and_by_mark(started: list[subprocess.Popen[bytes]]) -> None:
    mark = uuid.uuid4().hex
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', %r], env={}, start_new_session=True)"
    marked = start("import time; print('up', flush=True); time.sleep(60)", mark)
    parent = start(
        f"{spawn % 'import time; time.sleep(60)'}; import time; print('up', flush=True); time.sleep(60)", mark
    )
    stranger = start("import time; print('up', flush=True); time.sleep(60)")
    started += [marked, parent, stranger]
    assert process_tree.members([marked.pid]) == {marked.pid}
    found = process_tree.members((), f"MARK={mark}".encode())
    assert found > {marked.pid, parent.pid} and len(found) == 3  # with the child that has neither mark nor session
    assert stranger.pid not in found
    process_tree.send(found, signal.SIGKILL)


def test_a_zombie_is_no_member(started: list[subprocess.Popen[bytes]]) -> None:
    process = start("print('up', flush=True)")
    started.append(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_tree.members([process.pid]) == set()


def test_the_polite_end_first_and_the_others_after_the_grace(started: list[subprocess.Popen[bytes]]) -> None:
    polite = start("import time; print('up', flush=True); time.sleep(60)")
    stubborn = start(STUBBORN)
    started += [polite, stubborn]
    begin = time.monotonic()
    assert process_tree.end(lambda: process_tree.members([polite.pid, stubborn.pid]), grace=0.5) == set()
    assert 0.5 <= time.monotonic() - begin < 5
    assert polite.wait() == -signal.SIGTERM
    assert stubborn.wait() == -signal.SIGKILL


def test_nothing_to_end_takes_no_time() -> None:
    begin = time.monotonic()
    assert process_tree.end(set, grace=10) == set()
    assert time.monotonic() - begin < 1
