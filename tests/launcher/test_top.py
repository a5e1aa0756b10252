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


def until(launcher: Launcher, process: int, wanted: str) -> str:
    """Show the job again and again until the view has what is wanted."""
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        shown = finish(launcher.python("-m", "horovod.top", str(process), "--once", COLUMNS="200"))
        if shown.returncode == 0 and re.search(wanted, shown.stdout):
            return shown.stdout
        assert time.monotonic() < deadline, shown.stdout + shown.stderr
        time.sleep(0.2)
