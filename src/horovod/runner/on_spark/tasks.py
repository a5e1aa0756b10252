"""What each task of the stage does, in Spark's Python worker on an executor.

1. All tasks tell each other where they are.
2. The first task of each host starts the launcher's agent there.
3. The task of partition 0 is the launcher: it connects to the agents, which start, watch and end the ranks.
4. The other tasks hold a connection of the launcher until the end of the job, since Spark counts what they have reserved until
   then. They do not wait at Spark's barrier: an executor whose tasks are killed there may end.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horovod._base import pickling
from horovod.control.dial import anywhere, listening_socket
from horovod.runner.errors import LaunchError
from horovod.runner.function import FinishedCall, call_on_ranks
from horovod.runner.on_spark import grouping, meetings
from horovod.runner.on_spark.carried_output import CarriedOutput
from horovod.runner.on_spark.grouping import Attendance, TaskHost
from horovod.runner.on_spark.spark_job import SparkJob, reach_task
from horovod.runner.options import Options
from horovod.runner.reach import awaiting_agent
from horovod.runner.reach.reach import launcher_addresses
from horovod.runner.remote_call import RemoteCall

_ACCEPT_SECONDS = 60.0
AGAIN = (
    "a task of Spark has failed, or its executor or Python worker has ended, and Spark has started the tasks of this job "
    "again. horovod.spark.run does not train again from the beginning by itself. Look at the first attempt of the stage in "
    "Spark's web interface, and at the executors' logs"
)


@dataclass(frozen=True)
class TasksRequest:
    """What the driver asks of the tasks."""

    name: str
    """No other job has it."""
    size: int
    """The number of tasks."""
    call: RemoteCall
    options: Options
    environment: Mapping[str, str]
    """Variables of the ranks, beside those of their executor."""
    executable: str | None
    token: bytes
    """Admits the launcher to the agents."""
    seconds: float
    """How long the tasks may take to start."""
    barrier: bool = True
    driver: tuple[tuple[str, int], ...] = ()
    """The addresses of the driver's server; none if the driver cannot have one."""
    secret: bytes = b""
    """Of that server."""


@dataclass(frozen=True)
class TasksReply:
    """What the driver gets from the task of partition 0."""

    finished: FinishedCall | None = None
    problem: str = ""
    """Why there is no result."""
    output: Sequence[tuple[str, str]] = ()
    """The ranks' output that the driver has not got yet, as streams and texts."""


def run_in_task(request: TasksRequest) -> Iterator[bytes]:
    """Take part in the job. The task of partition 0 yields a pickled :class:`TasksReply`."""
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if request.barrier else TaskContext.get()
    index, attempt = context.partitionId(), context.taskAttemptId()
    earlier = _note_attempt(request.name, attempt)
    if context.attemptNumber() > 0:
        raise RuntimeError(AGAIN)
    addresses = launcher_addresses(request.options)
    server = listening_socket(anywhere(addresses), 0)
    with server:
        server.listen()
        resources = context.resources()
        here = Attendance(
            index=index,
            attempt=attempt,
            host=socket.gethostname(),
            container=os.environ.get("CONTAINER_ID", ""),
            addresses=list(addresses),
            port=server.getsockname()[1],
            cpus=context.cpus(),
            gpus=[str(each) for each in resources["gpu"].addresses] if "gpu" in resources else [],
            earlier=earlier,
        )
        tasks = [grouping.decode(each) for each in _meet(request, context, index, grouping.encode(here).decode())]
        if grouping.was_started_before(tasks):
            if index == 0:
                yield pickling.dumps(TasksReply(problem=AGAIN))
            return
        hosts = grouping.by_host(tasks)
        first = any(host.first.index == index for host in hosts)
        reply = b""
        if index == 0:
            agent = threading.Thread(
                target=_serve_agent, args=(server, request), name="horovod-spark-agent", daemon=True
            )
            agent.start()
            reply = pickling.dumps(_launch(request, hosts))
            with suppress(OSError):  # it has been closed
                server.shutdown(socket.SHUT_RDWR)  # in case that the launcher has not come so far
            agent.join()
        elif first:
            _serve_agent(server, request)
        else:
            awaiting_agent.hold(server, request.token, _ACCEPT_SECONDS)
    _forget_attempt(request.name, attempt)
    if reply:
        yield reply


def _meet(request: TasksRequest, context: Any, index: int, value: str) -> list[str]:
    if request.barrier:
        return meetings.at_barrier(context, value)
    return meetings.at_driver(request.driver, request.secret, index, request.size, value, request.seconds)


def reply_of(data: bytes) -> TasksReply:
    """What :func:`run_in_task` has yielded."""
    reply: TasksReply = pickle.loads(data)
    return reply


def _launch(request: TasksRequest, hosts: Sequence[TaskHost]) -> TasksReply:
    options = replace(request.options, num_proc=request.size)
    finished, problem = None, ""

    def make(wanted: Options, _: Mapping[str, str], *, hosts_python: bool = False) -> SparkJob:
        return SparkJob(wanted, request.environment, hosts_python=hosts_python, hosts=hosts, token=request.token)

    with CarriedOutput(request.driver, request.secret) as output, ExitStack() as held:
        try:
            for task in [each for host in hosts for each in host.tasks[1:]]:
                held.enter_context(reach_task(task, request.token))
            finished = call_on_ranks(
                request.call, options, request.executable, make, output.sink("stdout"), output.sink("stderr")
            )
        except (LaunchError, ValueError) as error:
            problem = str(error)
        except Exception:
            problem = f"the launcher, in the task of partition 0, failed:\n{traceback.format_exc()}"
    return TasksReply(finished, problem, output.rest())


def _serve_agent(server: socket.socket, request: TasksRequest) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_added_paths())}
    agent = awaiting_agent.serve(server, request.token, _ACCEPT_SECONDS, environment)
    if agent is not None:
        agent.wait()


def _added_paths() -> list[str]:
    """The entries of this worker's import path that are not the interpreter's own: files that Spark has brought here, too."""
    own = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [str(Path(entry).absolute()) for entry in sys.path if entry and not entry.startswith(own)]


def _note_attempt(name: str, attempt: int) -> list[int]:
    """Note on this executor that the task has been started. Returns all starts of the job's tasks that are noted there."""
    folder = _folder_of_executor()
    if folder is None:
        return []
    (folder / f"{name}.{attempt}").touch()
    return [int(path.suffix[1:]) for path in folder.glob(f"{name}.*")]


def _forget_attempt(name: str, attempt: int) -> None:
    folder = _folder_of_executor()
    if folder is not None:
        (folder / f"{name}.{attempt}").unlink(missing_ok=True)


def _folder_of_executor() -> Path | None:
    """A folder that Spark has made for this executor alone, and removes with it."""
    folder = Path(os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0])
    return folder if folder.is_absolute() and folder.is_dir() else None
