"""``horovod.spark.run``: calls a function on ranks in the tasks of Spark."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from horovod._base import config
from horovod.observe.call_site import warn
from horovod.runner.checks import number_of_ranks
from horovod.runner.on_spark.tasks import TasksRequest
from horovod.runner.options import Options
from horovod.runner.output.output import Sink, StreamSink
from horovod.runner.output.standard_input import NO_RANK
from horovod.runner.reach import awaiting_agent
from horovod.runner.remote_call import RemoteCall
from horovod.runner.timeout import Timeout
from horovod.spark import sessions

_SECONDS = 600
_STARTING = (
    "Timed out waiting for {activity}. Please check that you have enough resources to run all Horovod processes. Each rank "
    "is a task: give the application more cores or executors, or raise start_timeout if executors are started on demand."
)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a new job, and return what each rank returned.

    Each rank is a process on an executor, in a task of its own. The function calls ``hvd.init()`` itself. Tasks of one host
    have consecutive ranks; rank 0 is in the task of partition 0. Source: ``horovod.spark`` of Horovod 0.28.

    Args:
        fn, args, kwargs: what to call. All must be picklable by cloudpickle, as must the return value.
        num_proc: the number of ranks. Default: ``spark.default.parallelism``.
        start_timeout: seconds in which all tasks must have started, and in which ranks must have joined the rendezvous in
            ``hvd.init()``. Default: HOROVOD_SPARK_START_TIMEOUT, or 600. A session of Spark Connect has limits of its own for
            the first.
        use_mpi: refused: Spark starts the processes.
        use_gloo, extra_mpi_args: accepted for compatibility, no effect.
        env: variables of the ranks, beside those of their executor. Default: the driver's that begin with ``HOROVOD_``.
        stdout, stderr: where the ranks' output goes. Default: ``sys.stdout`` and ``sys.stderr`` of the driver.
        verbose: 2 or more describes the job on stderr before it starts.
        nics: the network interfaces that ranks may use. Default: all.
        prefix_output_with_timestamp: put the time before each line of output.
        executable: the Python interpreter that runs the ranks. Default: that of the executors.

    Returns:
        The return values by rank.

    Raises:
        ValueError: the arguments are wrong or contradict one another.
        Exception: there is neither an active SparkContext nor a session of Spark Connect.
        horovod.runner.timeout.TimeoutException: not all tasks have started in time.
        RuntimeError: a rank failed; the message holds its traceback, and ``__cause__`` is its exception, if that could be sent.
            Or a task was lost.
    """
    if use_mpi:
        raise ValueError("use_mpi: on Spark the ranks are started by Spark's tasks, not by mpirun; leave it out")
    if extra_mpi_args:
        warn("extra_mpi_args has no effect: horovod.spark.run uses no mpirun")
    seconds = _start_seconds(start_timeout)
    spark = sessions.active()
    size = number_of_ranks(spark.default_num_proc if num_proc is None else num_proc)
    request = TasksRequest(
        name=f"horovod-{secrets.token_hex(16)}",
        size=size,
        call=_call_of(fn, args, kwargs or {}),
        options=Options(
            start_timeout=seconds,
            nics=tuple(nics or ()),
            verbose=int(verbose) > 1,
            prefix_output_with_timestamp=prefix_output_with_timestamp,
            stdin=NO_RANK,
        ),
        environment=_variables(env),
        executable=executable,
        token=secrets.token_bytes(awaiting_agent.TOKEN_BYTES),
        seconds=seconds,
    )
    sinks: dict[str, Sink] = {
        "stdout": StreamSink(sys.stdout if stdout is None else stdout),
        "stderr": StreamSink(sys.stderr if stderr is None else stderr),
    }
    reply = spark.run(request, sinks, Timeout(seconds, _STARTING))
    for stream, text in reply.output:
        sinks[stream].write(text)
    if reply.finished is None:
        raise RuntimeError(reply.problem)
    return reply.finished.values()


def _start_seconds(asked: int | None) -> int:
    text = os.environ.get(config.SPARK_START_TIMEOUT, "").strip()
    if asked is None and text and not (text.isdecimal() and int(text)):
        raise ValueError(
            f"environment variable {config.SPARK_START_TIMEOUT}={text!r}: expected a number of seconds, at least 1"
        )
    found = int(text or _SECONDS) if asked is None else int(asked)
    if found < 1:
        raise ValueError(f"start_timeout must be at least 1 second, not {asked}")
    return found


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None:
        return {str(name): str(value) for name, value in env.items()}
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}


def _call_of(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> RemoteCall:
    # Executors have an import path of their own: files that Spark has brought there. The driver's comes after it.
    return replace(RemoteCall.of(function, arguments, keywords), prefix="")
