"""A running job is shown from outside: ``horovodrun --top``, ``python -m horovod.top``, and metrics."""

from __future__ import annotations

import re
import socket
import time

from launcher.harness import LIMIT_SECONDS, RUN_SECONDS, Launcher, finish

SCRIPT = """
import time
import torch
import horovod.torch as hvd

hvd.init()
for number in range(10 ** 9):
    hvd.allreduce(torch.ones(1000), name="gradient")
    if number == 400 and hvd.rank() == 1:
        time.sleep(3600)  # here
"""


def test_a_running_job_is_shown_with_the_rank_that_does_not_come(launcher: Launcher) -> None:
    (launcher.folder / "train.py").write_text(SCRIPT)
    job = launcher.start("-np", "2", "--metrics", "unix:metrics", "python", "train.py")
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "# here" in text)
    shown = until(launcher, job.pid, rf"(?m)^ *1 .* at train\.py:{line}\b")
    assert re.search(r"(?m)^2 ranks on 1 host \| 0:\d\d:\d\d \| ", shown)
    shown = until(launcher, job.pid, r"(?m)^ *0 .* waits for allreduce\.gradient at train\.py:\d+")
    ranks = [pid for pid, command in launcher.living().items() if command.startswith("python train.py")]
    assert len(ranks) == 2
    for rank in ranks:
        until(launcher, rank, "(?m)^2 ranks on 1 host")
    with socket.socket(socket.AF_UNIX) as scraper:
        scraper.settimeout(LIMIT_SECONDS)
        scraper.connect(str(launcher.folder / "metrics"))
        scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with scraper.makefile("rb") as answer:
            assert b"\nhorovod_ranks 2\n" in answer.read()
    job.terminate()
    job.communicate(timeout=RUN_SECONDS)
    refused = launcher.run("--top", str(job.pid))
    assert refused.returncode == 2
    assert f"no job has the process or batch number {job.pid} here" in refused.stderr


LOSES_ONE = """
import os, signal, sys, time
import torch
import horovod.torch as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    while True:
        if (hvd.rank(), hvd.size(), state.step) == (1, 3, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1000), name="gradient")
        state.step += 1
        state.commit()
        if hvd.size() == 2:
            print("goes on", flush=True)
            time.sleep(0.05)  # in this state until the test ends the job

train(hvd.elastic.TorchState(step=0))
"""


def test_the_view_and_the_recorders_say_who_was_lost(launcher: Launcher) -> None:
    (launcher.folder / "train.py").write_text(LOSES_ONE)
    lost = r"in round 1 rank 1 on localhost \(process 1, exit code 137 \(killed by SIGKILL\)\)"
    recorders = {"HOROVOD_FLIGHT_RECORDER_DIR": str(launcher.folder / "recorders")}
    job = launcher.start("-np", "3", "--min-np", "2", "python", "train.py", **recorders)
    launcher.await_line(job, "goes on", times=2)
    shown = until(launcher, job.pid, rf"(?m)^goes on without: {lost}")
    assert "| 1 recovery" in shown
    dumped = launcher.run("--dump", str(job.pid))
    assert re.search(rf"The job had gone on without these ranks before\n  {lost}", dumped.stdout), dumped.stdout
    job.terminate()
    _, errors = job.communicate(timeout=RUN_SECONDS)
    assert re.search(rf"(?m)^horovodrun: the job has gone on without: {lost}$", errors), errors
    assert re.search(
        r"was lost while the others were in allreduce 'gradient' at \S+train\.py:\d+; 2 ranks go on", errors
    )


def until(launcher: Launcher, process: int, wanted: str) -> str:
    """Show the job again and again until the view has what is wanted."""
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        shown = finish(launcher.python("-m", "horovod.top", str(process), "--once", COLUMNS="200"))
        if shown.returncode == 0 and re.search(wanted, shown.stdout):
            return shown.stdout
        assert time.monotonic() < deadline, shown.stdout + shown.stderr
        time.sleep(0.2)
