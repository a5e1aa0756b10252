"""The tasks of ``horovod.spark.run`` as processes that meet as Spark's tasks do, without Spark: which become which ranks, what
comes back, and what is left of a job whose tasks are lost."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod._base import pickling
from horovod.control.rendezvous.server import RendezvousServer
from horovod.environments import identity
from horovod.runner.on_spark.carried_output import KEY
from horovod.runner.on_spark.tasks import AGAIN, TasksReply, TasksRequest
from horovod.runner.options import Options
from horovod.runner.output.standard_input import NO_RANK
from horovod.runner.reach.awaiting_agent import TOKEN_BYTES
from horovod.runner.remote_call import RemoteCall
from time_limits import JOB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the tasks cannot import it
TASK = Path(__file__).resolve().parents[1] / "spark_task.py"


class Stage:
    """Tasks of one job.

    Args:
        folder: of the test.
        containers: of each task, the container of its executor; the same for those of one host.
    """

    def __init__(self, folder: Path, containers: Sequence[str]) -> None:
        self.containers = containers
        self.folder = folder
        self.name = f"horovod-{secrets.token_hex(4)}"
        self.gpus: Sequence[Sequence[str]] = [[]] * len(containers)
        self.options: dict[str, Any] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._servers: list[RendezvousServer] = []

    def start(self, function: Callable[..., Any], *arguments: Any, attempts: Sequence[int] = (), **more: Any) -> None:
        size = len(self.containers)
        server = RendezvousServer(b"stage")
        server.start()
        self._servers.append(server)
        request = TasksRequest(
            name=self.name,
            size=size,
            call=RemoteCall("", "", RemoteCall.of(function, arguments, {}).call),  # type: ignore[arg-type]
            options=Options(stdin=NO_RANK, start_timeout=int(JOB), **self.options),
            environment={"MINE": "yes"},
            executable=None,
            token=secrets.token_bytes(TOKEN_BYTES),
            seconds=JOB,
            **more,
        )
        path = self.folder / "request"
        path.write_bytes(pickling.dumps(request))
        for index, container in enumerate(self.containers):
            executor = self.folder / f"executor{container}"
            executor.mkdir(exist_ok=True)
            words = [sys.executable, str(TASK), str(path), str(index), str((attempts or range(size))[index])]
            self.processes.append(
                subprocess.Popen(
                    [*words, str(server.address[1]), *self.gpus[index]],
                    cwd=executor,
                    env={
                        **os.environ,
                        "CONTAINER_ID": container,
                        "SPARK_LOCAL_DIRS": str(executor),
                        "PYTHONPATH": os.pathsep.join([str(TASK.parent), os.environ.get("PYTHONPATH", "")]),
                    },
                    stdin=subprocess.DEVNULL,
                )
            )

    def reply(self) -> TasksReply:
        """What the task of partition 0 has for the driver, once all have ended."""
        assert [each.wait(JOB) for each in self.processes] == [0] * len(self.processes)
        self.processes = []
        replies = [
            pickle.loads((self.folder / f"request.{index}").read_bytes()) for index in range(len(self.containers))
        ]
        assert [len(each) for each in replies] == [1] + [0] * (len(replies) - 1)
        found: TasksReply = pickle.loads(replies[0][0])
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for server in self._servers:
            server.stop()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(*containers: str) -> Stage:
        made.append(Stage(tmp_path, containers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def place() -> list[Any]:
    own = identity()
    numbers = [own.rank, own.size, own.local_rank, own.local_size, own.cross_rank]
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MINE")
    print(f"I am rank {own.rank}", flush=True)
    return [numbers, Path.cwd().name, *(os.environ.get(name) for name in names)]


def test_tasks_of_one_container_are_the_ranks_of_a_host(stage: Callable[..., Stage]) -> None:
    tasks = stage("a", "b", "a", "b")
    tasks.gpus = [["1"], ["0"], ["0"], ["3"]]
    tasks.start(place)
    reply = tasks.reply()
    assert reply.finished is not None, reply.problem
    assert reply.finished.values() == [
        [[0, 4, 0, 2, 0], "executora", "1,0", "3", "yes"], [[1, 4, 1, 2, 0], "executora", "1,0", "3", "yes"],
        [[2, 4, 0, 2, 1], "executorb", "0,3", "3", "yes"], [[3, 4, 1, 2, 1], "executorb", "0,3", "3", "yes"],
    ]  # fmt: skip
    said = "".join(text for stream, text in reply.output if stream == "stdout")
    assert sorted(said.splitlines()) == [f"[{rank}]<stdout>:I am rank {rank}" for rank in range(4)]
    assert not list(tasks.folder.glob("executor*/*")), "nothing is left with the executors"


def test_output_goes_to_a_driver_that_can_be_reached(stage: Callable[..., Stage]) -> None:
    tasks = stage("a")
    heard: list[tuple[str, bytes]] = []
    driver = RendezvousServer(b"driver's")
    driver.pass_on(KEY, lambda key, text: heard.append((key, text)))
    driver.start()
    try:
        tasks.start(place, driver=(("127.0.0.1", driver.address[1]),), secret=b"driver's")
        reply = tasks.reply()
    finally:
        driver.stop()
    assert reply.finished is not None and not [text for stream, text in reply.output if stream == "stdout"]
    assert heard == [(f"{KEY}stdout", b"[0]<stdout>:I am rank 0\n")]


def test_plain_tasks_meet_at_the_driver(stage: Callable[..., Stage]) -> None:
    tasks = stage("a", "b")
    driver = RendezvousServer(b"driver's")
    driver.start()
    try:
        tasks.start(place, driver=(("127.0.0.1", driver.address[1]),), secret=b"driver's", barrier=False)
        reply = tasks.reply()
    finally:
        driver.stop()
    assert reply.finished is not None
    assert [numbers[:2] for numbers, *_ in reply.finished.values()] == [[0, 2], [1, 2]]


def fail(culprit: int) -> None:
    if identity().rank == culprit:
        raise KeyError("no data on this rank")


def test_the_exception_of_a_rank_comes_back_with_its_line(stage: Callable[..., Stage]) -> None:
    tasks = stage("a", "b")
    tasks.start(fail, 1)
    reply = tasks.reply()
    assert reply.finished is not None
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*test_spark_tasks.py\", line \d+, in fail") as caught:
        reply.finished.values()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_request_that_cannot_be_met_is_a_problem(stage: Callable[..., Stage]) -> None:
    tasks = stage("a")
    tasks.options = {"output_filename": "/proc/nowhere"}
    tasks.start(place)
    reply = tasks.reply()
    assert reply.finished is None and "/proc/nowhere" in reply.problem


def test_tasks_that_spark_has_started_again_run_nothing(stage: Callable[..., Stage]) -> None:
    tasks = stage("a", "b")
    tasks.folder.joinpath("executorb").mkdir()
    tasks.folder.joinpath("executorb", f"{tasks.name}.7").touch()  # of an attempt that Spark has killed
    tasks.start(place, attempts=[8, 9])
    reply = tasks.reply()
    assert reply.finished is None and reply.problem == AGAIN
