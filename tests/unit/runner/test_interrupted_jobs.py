"""A job that a handler's exception interrupts, wherever it has come to, leaves no process and no thread.

The point is a random one: a job has thousands."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from horovod.runner.jobs import make_job
from horovod.runner.options import Options
from horovod.runner.output.output import Sink
from interruptions import interrupted_at
from time_limits import SOON

TAG = "INTERRUPTED_JOB_TAG"
JOBS = {
    "ranks that end": Options(command=("true",), num_proc=2),
    "an elastic job": Options(command=("true",), num_proc=2, min_num_proc=1),
    "a discovery script": Options(command=("true",), host_discovery_script="echo localhost:2", min_num_proc=2),
}
POINTS = 4500
"""About as many as such a job has, from its first to its last."""
TRIES = 12


class Nowhere(Sink):
    def write(self, text: str) -> None:
        pass


def living(tag: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if f"{TAG}={tag}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                pass
    return found


@pytest.mark.parametrize("name", JOBS)
def test_an_interrupted_job_leaves_nothing(name: str) -> None:
    """In a process of its own, whose descriptors may be lost: that ends with the exception in most programs."""
    tests = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        TAG: uuid.uuid4().hex,
        "PYTHONPATH": f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    subprocess.run([sys.executable, __file__, name], env=environment, check=True, timeout=250)


def main(name: str) -> None:
    tag = os.environ[TAG]
    threads = threading.active_count()
    for point in random.sample(range(POINTS), TRIES):
        interrupted_at(point, lambda: make_job(JOBS[name], os.environ).run(Nowhere(), Nowhere()))
        deadline = time.monotonic() + SOON
        while (left := living(tag)) or threading.active_count() > threads:
            assert time.monotonic() < deadline, f"left after an exception at point {point}: {left}"
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
