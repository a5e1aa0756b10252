"""Jobs in which something goes wrong, and what ``python -m horovod.diagnose`` says of each in words."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod._base import config
from horovod.core.lifecycle.context import current
from horovod.diagnose.dumped_job import DumpedJob
from horovod.diagnose.finding import Finding
from horovod.diagnose.findings import findings
from horovod.diagnose.report import text
from horovod.observe.dump import read
from launcher.harness import Launcher
from ranks import RankPool
from time_limits import JOB, SOON

Ranks = Callable[..., RankPool]

ENDS_SOON = {config.STALL_CHECK_TIME: "1", config.STALL_SHUTDOWN_TIME: "2"}
GOES_ON = {config.STALL_CHECK_TIME: "1"}
DEADLINE_SECONDS = SOON


def generation(env: dict[str, str], function: Callable[[], None]) -> str:
    """Run a scene on a rank; the error that the job ended with, if it did."""
    os.environ.update(env)
    try:
        hvd.init()
        function()
        return ""
    except hvd.HorovodInternalError as error:
        return str(error)
    finally:
        hvd.shutdown()
        for name in env:
            del os.environ[name]


def play(pool: RankPool, folder: Path, env: dict[str, str], function: Callable[[], None]) -> DumpedJob:
    """Play a scene to its end; what the ranks have written."""
    pool.run(generation, {**env, config.FLIGHT_RECORDER_DIR: str(folder)}, function)
    return DumpedJob(read([folder]))


def first(job: DumpedJob) -> Finding:
    """What the diagnosis says first. Shown in full where the test fails."""
    found = findings(job)
    print(text(job, found))
    return found[0]


def await_files(folder: Path, *ranks: int) -> None:
    """Until these ranks have written."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all((folder / f"rank-{rank}.json").exists() for rank in ranks):
        assert time.monotonic() < deadline, sorted(folder.parent.rglob("*"))
        time.sleep(0.05)


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def step(number: int, layers: int = 3) -> None:
    for layer in range(layers):
        hvd.allreduce(torch.ones(64), name=f"layer{layer}")


# Ranks that go apart.


def test_a_rank_that_skips_a_layer(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        for number in range(5):
            step(number)
        for layer in (0, 2) if hvd.rank() == 1 else (0, 1, 2):
            hvd.allreduce(torch.ones(64), name=f"layer{layer}")

    pool = ranks(3, framework="torch")
    said = first(play(pool, tmp_path / "r", ENDS_SOON, scene))
    assert (said.kind, said.ranks, said.collective, said.occurrence) == ("apart", [1], "allreduce.layer1", 6)
    assert "rank 1 skipped 'allreduce.layer1'" in said.text
    assert said.call_sites[1] == line_of(scene, 4)
    # It was said at once, and not when the stall was reported.
    assert "The ranks wait for different collectives" in pool.output(0)


def test_collectives_in_another_order(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        for name in ("a", "b") if hvd.rank() != 2 else ("b", "a"):
            hvd.allreduce(torch.ones(64), name=name)

    pool = ranks(3, framework="torch")
    said = first(play(pool, tmp_path / "r", ENDS_SOON, scene))
    assert (said.kind, said.ranks) == ("apart", [2])
    assert "Ranks 0-1 have been waiting" in said.text and "'allreduce.a'" in said.text
    assert "Rank 2 submitted 'allreduce.b' instead" in said.text and "the order of a loop" in said.text
    shown = pool.output(0)
    hint = shown.index("The ranks wait for different collectives, so none of these can complete:")
    assert shown.index("ranks 0, 1: allreduce.a") > hint < shown.index("rank 2: allreduce.b")


def test_no_hint_while_a_rank_still_computes(ranks: Ranks, tmp_path: Path) -> None:
    """What is under way in another order comes together, if ranks do not wait for it one by one."""

    def scene() -> None:
        names = ["a", "b"] if hvd.rank() else ["b", "a"]
        handles = []
        for name in names:
            handles.append(hvd.allreduce_async(torch.ones(64), name=name))
            time.sleep(2.0)  # in backward
        for handle in handles:
            hvd.synchronize(handle)

    pool = ranks(2, framework="torch")
    pool.run(generation, {config.FLIGHT_RECORDER_DIR: str(tmp_path / "r")}, scene)
    assert pool.output(0) == pool.output(1) == ""
    assert not (tmp_path / "r").exists()


def test_another_shape_at_step_812(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        for number in range(1, 900):
            rows = 5 if number == 812 and hvd.rank() == 2 else 4
            hvd.allreduce(torch.ones(rows, 3), name="features")

    said = first(play(ranks(3, framework="torch"), tmp_path / "r", {}, scene))
    assert (said.kind, said.ranks, said.collective, said.occurrence) == ("mismatch", [2], "allreduce.features", 812)
    assert "the 812th of that name" in said.text
    assert "rank 2 submitted allreduce of float32 [5, 3]" in said.text
    assert f"ranks 0-1 submitted allreduce of float32 [4, 3], at {line_of(scene, 3)}" in said.text


# Ranks that do something else.


def test_a_rank_in_input(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        step(0)
        if hvd.rank() == 1:
            answer = input("continue? ")
            assert answer == "yes"
        step(1)

    def with_terminal(folder: str, env: dict[str, str]) -> str:
        if os.environ[config.RANK] == "1":
            os.dup2(os.open(f"{folder}/terminal", os.O_RDONLY), 0)
            sys.stdin = os.fdopen(0, closefd=False)
        return generation(env, scene)

    os.mkfifo(tmp_path / "terminal")
    folder = tmp_path / "r"
    pool = ranks(3, framework="torch")
    env = {**GOES_ON, config.FLIGHT_RECORDER_DIR: str(folder)}
    call = pool.start(with_terminal, str(tmp_path), env)
    with (tmp_path / "terminal").open("w") as terminal:
        await_files(folder, 0, 1, 2)
        job = DumpedJob(read([folder]))
        terminal.write("yes\n")
    call.results()
    said = first(job)
    assert (said.kind, said.ranks, said.waiting) == ("silent", [1], [0, 2])
    assert "waits for input at the terminal" in said.text and line_of(scene, 3) in said.text
    assert "it has submitted nothing since 'allreduce.layer2'" in said.text
    assert "'allreduce.layer0' (the 2nd of that name)" in said.text


def test_a_stopped_rank(ranks: Ranks, tmp_path: Path) -> None:
    ready, folder = tmp_path / "ready", tmp_path / "r"

    def scene(ready: str) -> None:
        step(0)
        if hvd.rank() == 1:
            Path(ready).touch()
            deadline = time.monotonic() + SOON
            while not Path(f"{ready}.goes.on").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        step(1)

    pool = ranks(3, framework="torch")
    env = {**GOES_ON, config.FLIGHT_RECORDER_DIR: str(folder)}
    call = pool.start(generation, env, functools.partial(scene, str(ready)))
    while not ready.exists():
        time.sleep(0.05)
    pool.kill(1, signal.SIGSTOP)
    try:
        await_files(folder, 0, 2)
        job = DumpedJob(read([folder]))
        (tmp_path / "ready.goes.on").touch()
    finally:
        pool.kill(1, signal.SIGCONT)
    call.results()
    said = first(job)
    assert (said.kind, said.ranks, said.waiting) == ("stopped", [1], [0, 2])
    assert "its process is stopped" in said.text and "'allreduce.layer0' (the 2nd of that name)" in said.text


def test_a_rank_whose_interpreter_is_held(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        step(0)
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(1), name="late")
        elif hvd.rank() == 1:
            deque(map(ctypes.PyDLL(None).usleep, [100_000] * 50), maxlen=0)  # no bytecode in between
            hvd.allreduce(torch.ones(1), name="late")
        else:
            hvd.allreduce(torch.ones(1), name="late")
        step(1)

    folder = tmp_path / "r"
    pool = ranks(3, framework="torch")
    call = pool.start(generation, {**GOES_ON, config.FLIGHT_RECORDER_DIR: str(folder)}, scene)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (folder / "rank-1.stacks").exists():  # another rank writes it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job = DumpedJob(read([folder]))
    call.results()
    said = first(job)
    assert sorted(job.dumps) == [0, 2]
    assert f'File "{__file__}", line {scene.__code__.co_firstlineno + 5} in scene' in job.stacks[1]
    assert (said.kind, said.ranks) == ("held", [1])
    assert "keeps Python's interpreter lock" in said.text and line_of(scene, 5) in said.text


class Stuck(torch.utils.data.Dataset[int]):
    """Takes a lock that the process had taken before it forked the loader's worker."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def test_a_rank_in_a_deadlocked_dataloader(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        step(0)
        if hvd.rank() == 1:
            data = Stuck()
            data.lock.acquire()
            try:
                next(iter(torch.utils.data.DataLoader(data, num_workers=1, timeout=4, multiprocessing_context="fork")))
            except RuntimeError:
                pass  # its own time limit
        step(1)

    said = first(play(ranks(2, framework="torch"), tmp_path / "r", ENDS_SOON, scene))
    assert (said.kind, said.ranks, said.waiting) == ("silent", [1], [0])
    assert "waits for the worker processes of its DataLoader" in said.text and line_of(scene, 6) in said.text


# Nobody's script is wrong.


def test_all_ranks_hang_in_one_collective(ranks: Ranks, tmp_path: Path) -> None:
    folder, over = tmp_path / "r", tmp_path / "over"

    def scene(over: str) -> None:
        step(0)
        communicator = current().workers[0].communicator
        reduce = communicator.allreduce

        def hang(*arguments: Any) -> Any:
            deadline = time.monotonic() + SOON
            while not Path(over).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            return reduce(*arguments)

        communicator.allreduce = hang  # type: ignore[method-assign]
        Path(f"{over}.{hvd.rank()}").touch()
        hvd.allreduce(torch.ones(1 << 20), name="large")

    pool = ranks(3, framework="torch")
    call = pool.start(generation, {config.FLIGHT_RECORDER_DIR: str(folder)}, functools.partial(scene, str(over)))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all((tmp_path / f"over.{rank}").exists() for rank in range(3)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    pool.kill(2, signal.SIGURG)  # any rank: it asks the others
    await_files(folder, 0, 1, 2)
    job = DumpedJob(read([folder]))
    over.touch()
    call.results()
    said = first(job)
    assert (said.kind, said.ranks, said.collective) == ("inside", [0, 1, 2], "allreduce.large")
    assert "every rank has submitted it" in said.text and "the engine shm" in said.text
    assert job.dumps[0].why == "request"


def test_a_rank_that_is_slower_and_where(ranks: Ranks, tmp_path: Path) -> None:
    def scene() -> None:
        for _ in range(60):
            time.sleep(0.02 if hvd.rank() != 1 else 0.028)  # loads data
            hvd.allreduce(torch.ones(64), name="loss")
            time.sleep(0.01)  # backward
            hvd.allreduce(torch.ones(64), name="gradient")
        hvd.barrier()
        (tmp_path / f"left-{hvd.rank()}").touch()
        given_up = time.monotonic() + SOON
        while len(list(tmp_path.glob("left-*"))) < hvd.size() and time.monotonic() < given_up:
            time.sleep(0.01)  # all have left the barrier
        if hvd.rank() == 0:
            current().watch.request_dump("request", "the test asks")
        time.sleep(1.0)

    said = first(play(ranks(3, framework="torch"), tmp_path / "r", {}, scene))
    assert (said.kind, said.ranks, said.waiting) == ("straggler", [1], [0, 2])
    assert said.collective == "allreduce.loss"
    assert f"between 'allreduce.gradient' ({line_of(scene, 5)}) and 'allreduce.loss' ({line_of(scene, 3)})" in said.text


# Ranks that end. Real jobs: the launcher knows how.


PLAIN = """
import os, sys, time, numpy, signal
sys.path.insert(0, {cluster!r})
import plain
plain.init()
one = numpy.ones(8, numpy.float32)
for step in range(5):
    plain.allreduce(one, "gradient")
"""


def ended(
    launcher: Launcher, script: str, ranks: int = 3, **extra: str
) -> tuple[DumpedJob, subprocess.CompletedProcess[str]]:
    """Run a script that ends badly; what its ranks have written."""
    cluster = str(Path(__file__).parents[1] / "cluster")
    (launcher.folder / "train.py").write_text(PLAIN.format(cluster=cluster) + script)
    extra[config.FLIGHT_RECORDER_DIR] = "what the ranks' recorders held"  # the command that is shown quotes it
    done = launcher.run("-np", str(ranks), "python", "train.py", **extra)
    named = [line for line in done.stderr.splitlines() if "python -m horovod.diagnose" in line]
    assert named, done.stderr
    assert named == [done.stderr.splitlines()[-1]]
    (folder,) = shlex.split(named[0].partition("python -m horovod.diagnose ")[2])
    return DumpedJob(read([Path(folder)])), done


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    try:
        yield started
        started.await_nothing()
    finally:
        for number in started.living():
            os.kill(number, signal.SIGKILL)
        for process in started.started:
            process.communicate(timeout=DEADLINE_SECONDS)


def test_a_full_disk_while_a_checkpoint_is_written(launcher: Launcher) -> None:
    job, _ = ended(
        launcher,
        """
if plain.rank() == 0:
    time.sleep(1)  # the others come to wait for it
    with open("/dev/full", "wb") as checkpoint:
        checkpoint.write(one.tobytes())
plain.allreduce(one, "gradient")
""",
    )
    said = first(job)
    assert (said.kind, said.ranks, said.waiting) == ("raised", [0], [1, 2])
    assert "OSError: [Errno 28] No space left on device" in said.text and "A disk or a quota is full" in said.text
    assert "train.py:12" in said.text and "Ranks 1-2 wait for it in 'allreduce.gradient'" in said.text


def test_rank_0_is_killed(launcher: Launcher) -> None:
    job, _ = ended(
        launcher,
        """
if plain.rank() == 0:
    time.sleep(1)  # the others come to wait for it
    os.kill(os.getpid(), signal.SIGKILL)
plain.allreduce(one, "gradient")
""",
    )
    said = first(job)
    assert (said.kind, said.ranks, said.waiting) == ("killed", [0], [1, 2])
    assert "killed by SIGKILL" in said.text
    # On a busy machine, a rank may not have left the fifth yet, whose sum it already has.
    assert re.search(r"Ranks 1-2 wait for it in 'allreduce.gradient' \(the (5|6)th of that name\)", said.text)
    assert sorted(job.dumps) == [1, 2]


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group of processes that may use 64 MB."""
    group = MEMORY / f"hvd-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    deadline = time.monotonic() + SOON
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, "processes are left in the control group"
            time.sleep(0.05)


def test_a_rank_that_is_killed_for_memory(launcher: Launcher, little_memory: Path) -> None:
    job, _ = ended(
        launcher,
        f"""
if plain.rank() == 2:
    time.sleep(1)  # the others come to wait for it
    open("{little_memory}/cgroup.procs", "w").write(str(os.getpid()))
    data = bytearray(256 << 20)
plain.allreduce(one, "gradient")
""",
    )
    said = first(job)
    assert (said.kind, said.ranks, said.waiting) == ("killed", [2], [0, 1])
    assert "killed by SIGKILL" in said.text
    assert "for lack of memory since the job began" in said.text


# A job that runs.


def test_a_running_job_is_asked(launcher: Launcher) -> None:
    script = "print('ready', flush=True)\ninput() if plain.rank() == 1 else plain.allreduce(one, 'next')\n"
    cluster = str(Path(__file__).parents[1] / "cluster")
    (launcher.folder / "train.py").write_text(PLAIN.format(cluster=cluster) + script)
    job = launcher.start("-np", "2", "--stdin", "1", "python", "train.py")
    launcher.await_line(job, "ready", times=2)
    rank = next(pid for pid, command in launcher.living().items() if command.startswith("python train.py"))
    for process in (job.pid, rank):
        asked = launcher.run("--dump", str(process))
        assert asked.returncode == 0, asked.stderr
        assert "Rank 1" in asked.stdout and "waits for input at the terminal" in asked.stdout, asked.stdout
        assert "Rank 0 has been waiting" in asked.stdout and "'allreduce.next'" in asked.stdout
    for wrong in ("1", "0"):
        refused = launcher.run("--dump", wrong)
        assert refused.returncode == 2 and "neither horovodrun nor a rank" in refused.stderr
    assert job.poll() is None
    job.terminate()
    job.communicate(timeout=DEADLINE_SECONDS)


# What tools read.


def test_the_forms_for_tools(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def scene() -> None:
        step(0)
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(64), name="next")
        else:
            time.sleep(1.5)
            current().watch.request_dump("request", "the test asks")
            time.sleep(1.0)
            hvd.allreduce(torch.ones(64), name="next")

    folder = tmp_path / "r"
    play(ranks(2, framework="torch"), folder, {}, scene)
    program = [sys.executable, "-m", "horovod.diagnose", str(folder)]
    done = subprocess.run(
        [*program, "--json", "--plot", str(tmp_path / "p.png"), "--pytorch", str(tmp_path / "fr")],
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["schema"] == 1 and content["size"] == 2
    assert [each["kind"] for each in content["findings"]] == ["silent"]
    assert content["ranks"][0]["waits_for"] == "allreduce.next"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    analyser = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "rank_", str(tmp_path / "fr")],
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    if "No module named" in analyser.stderr:
        pytest.skip("this PyTorch comes without the analyser")
    said = analyser.stdout + analyser.stderr
    assert "internal record id: 4" in said and "all_reduce" in said, said
    nothing = subprocess.run([*program[:3], str(tmp_path)], capture_output=True, text=True, timeout=SOON)
    assert nothing.returncode == 2 and "no rank has written" in nothing.stderr
