"""What runs in Ray's workers. The training function runs on a thread there, inside :func:`in_job`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import ray
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.train_fn_utils import set_train_fn_utils

from horovod.core.lifecycle import context
from horovod.ray.base_worker import leaving_on_error
from horovod.ray.train.reports import ElasticReports
from horovod.runner.agent.messages import Exit
from horovod.runner.agent.own_process import NotWanted, RankOfOwnProcess
from horovod.runner.reach import awaiting_agent

_ACCEPT_SECONDS = 60.0
_BEGIN_SECONDS = 600.0
"""How long the launcher may take to start the rank of a worker."""


class WorkerPlace(NamedTuple):
    """Where a worker is."""

    host: str
    node: str
    """Ray's number of the node."""
    number: int
    """Ray's number of the worker in its group, which the worker that replaces it has, too."""


def place() -> WorkerPlace:
    """Where this worker is."""
    number = ray.train.get_context().get_world_rank()
    return WorkerPlace(socket.gethostname(), str(ray.get_runtime_context().get_node_id()), int(number))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this worker."""
    os.environ.update(variables)


@contextmanager
def in_job() -> Iterator[None]:
    """The training function: if it raises, the other ranks get its error."""
    with ExitStack() as stack:
        if _attachment is not None:
            stack.enter_context(_attachment.taking_part())
        with leaving_on_error():
            yield
            context.shutdown()


class Attachment:
    """This worker's part in an elastic job, whose launcher connects to it.

    Args:
        token: admits the launcher.

    Attributes:
        address: where it waits for the launcher.
    """

    def __init__(self, token: bytes) -> None:
        server = socket.create_server(("", 0))
        self.address: tuple[str, int] = (ray.util.get_node_ip_address(), server.getsockname()[1])
        self._rank: Future[RankOfOwnProcess] = Future()
        threading.Thread(target=self._admit, args=(server, token), name="horovod-ray", daemon=True).start()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Be a rank of the job.

        Raises:
            NotWanted: the job has ended.
            TimeoutError: the launcher has not connected, or has not started this rank in time.
        """
        rank = self._rank.result(_ACCEPT_SECONDS)
        os.environ.update(rank.begin(_BEGIN_SECONDS))
        if "torch" in sys.modules:  # it was imported before this process was a rank
            from horovod._torch_backend import meet_by_launcher

            meet_by_launcher()
        reports = ElasticReports()
        set_train_fn_utils(reports)
        end = Exit(0)
        try:
            yield
            reports.finish()
        except BaseException as error:
            if not _is_quiet(error):
                end = Exit(1, reason=f"its training function raised {type(error).__name__}: {_first_line(error)}")
            raise
        finally:
            rank.end(end)

    def _admit(self, server: socket.socket, token: bytes) -> None:
        connection = awaiting_agent.admit(server, token, _ACCEPT_SECONDS)
        if connection is None:
            self._rank.set_exception(
                NotWanted(
                    "the launcher of the elastic job, which runs in Ray's controller, has not connected to this worker within "
                    f"{_ACCEPT_SECONDS:g} seconds: let the controller's node connect to {':'.join(map(str, self.address))} "
                    "and other ports of this node"
                )
            )
        else:
            self._rank.set_result(RankOfOwnProcess(connection))


_attachment: Attachment | None = None


def attach(token: bytes) -> tuple[WorkerPlace, tuple[str, int]]:
    """Make this worker wait for the launcher of an elastic job. Returns where it is, and the address where it waits."""
    global _attachment
    _attachment = Attachment(token)
    _change_training_thread(_quietly)
    return place(), _attachment.address


def skip_training() -> None:
    """Do not call the training function: the other ranks have returned from theirs."""
    _change_training_thread(lambda _: None)


def _change_training_thread(call: Callable[[Callable[[], Any]], Any]) -> None:
    """Have the thread that runs the training function run ``call(function)`` instead."""
    runner: Any = get_train_context().execution_context.training_thread_runner
    run = runner.run
    runner.run = lambda function: run(lambda: call(function))


def _quietly(function: Callable[[], Any]) -> Any:
    """A rank that gets no rank in the next round has ended well: that is no error for Ray."""
    try:
        return function()
    except SystemExit as error:
        if not _is_quiet(error):
            raise
        return None


def _is_quiet(error: BaseException) -> bool:
    """Whether the job goes on, or has ended well, without this rank."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else ""
