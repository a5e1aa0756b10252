"""Programs of the tests: ``python programs.py NAME ARGUMENTS`` is a driver. The last line is the result (JSON)."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

import horovod.spark

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
MASTER = "local-cluster[2,2,1024]"


def session(remote: bool = False) -> Any:
    """Spark on two executors with two cores each, directly or through Spark Connect."""
    builder = (
        SparkSession.builder.appName("horovod")
        .config("spark.ui.enabled", "false")
        .config("spark.default.parallelism", "4")
    )
    for name, value in json.loads(os.environ["SETTINGS"]).items():
        builder = builder.config(name, value)
    return (builder.remote(MASTER) if remote else builder.master(MASTER)).getOrCreate()


def whoami(first: int = 0, second: int = 0) -> list[Any]:
    """Runs on a rank."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
    print(f"I am rank {hvd.rank()}", flush=True)
    places = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]
    return [*places, total, first + second, os.environ.get("MINE")]


def fail_on_rank_1() -> None:
    """Runs on a rank."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        raise KeyError("no data on this rank")
    hvd.allreduce(torch.ones(1))


def train_for_long() -> None:
    """Runs on a rank."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    print("training", flush=True)
    while True:
        hvd.allreduce(torch.ones(1))
        time.sleep(0.05)  # until an executor is killed


def whole() -> Any:
    """Values by rank, output, the error of a rank, and a job after it."""
    spark = session()
    out = io.StringIO()
    found: dict[str, Any] = {}
    found["ranks"] = horovod.spark.run(whoami, args=(40,), kwargs={"second": 2}, env={"MINE": "yes"}, stdout=out)
    found["output"] = sorted(out.getvalue().splitlines())
    found["error"] = error_of(fail_on_rank_1, num_proc=3)
    found["after"] = horovod.spark.run(whoami, num_proc=2, stdout=io.StringIO())
    found["group"] = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
    found["too many"] = error_of(whoami, num_proc=99, start_timeout=5)
    return found


def through_connect() -> Any:
    """The same for a client of Spark Connect."""
    session(remote=True)
    out = io.StringIO()
    found = {"ranks": horovod.spark.run(whoami, num_proc=4, env={"MINE": "yes"}, stdout=out)}
    return {**found, "output": sorted(out.getvalue().splitlines()), "error": error_of(fail_on_rank_1, num_proc=3)}


def error_of(function: Callable[..., Any], **options: Any) -> list[str]:
    """The type and the text of the error of a job, and the type of its cause."""
    try:
        horovod.spark.run(function, stdout=io.StringIO(), stderr=io.StringIO(), **options)
    except Exception as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    return []


def ranks() -> Any:
    """One job."""
    session()
    return horovod.spark.run(whoami, num_proc=4)


def without_an_executor() -> Any:
    """The error of a job one of whose executors is killed, and how many ranks are left."""
    session()
    out = io.StringIO()
    processes: list[psutil.Process] = []

    def kill() -> None:
        while "training" not in out.getvalue():
            time.sleep(0.1)  # ends with the program at the latest
        processes.extend(running("horovod.runner.run_task"))
        running("CoarseGrainedExecutorBackend")[-1].send_signal(signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    try:
        horovod.spark.run(train_for_long, num_proc=4, stdout=out)
    except RuntimeError as error:
        _, left = psutil.wait_procs(processes, timeout=60)
        return {"error": str(error), "ranks": len(processes), "left": len(left)}


def running(word: str) -> list[psutil.Process]:
    """The processes that this one has started, also through others, with this word in their command."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(word in each for each in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it has ended
    return found


def mnist(how: str, data: str, epochs: str) -> Any:
    """The example's training."""
    import cloudpickle

    import spark_mnist

    cloudpickle.register_pickle_by_value(spark_mnist)
    session(remote=how == "connect")
    images, labels = spark_mnist.load(data)
    return horovod.spark.run(spark_mnist.train, args=(images, labels, int(epochs)), num_proc=2)


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (whole, through_connect, ranks, without_an_executor, mnist)
}


if __name__ == "__main__":
    result = PROGRAMS[sys.argv[1]](*sys.argv[2:])
    print(f"\nresult: {json.dumps(result)}", flush=True)
    active = SparkSession.getActiveSession()
    if active is not None:
        active.stop()
