"""Runs the tasks as a job of the active SparkContext, and watches it from the driver."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark import InheritableThread, SparkContext

from horovod.control.dial import anywhere
from horovod.control.mesh import own_addresses
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import make_secret
from horovod.runner.on_spark.carried_output import KEY
from horovod.runner.on_spark.tasks import AGAIN, TasksReply, TasksRequest, reply_of, run_in_task
from horovod.runner.output.output import ReaderGone, Sink
from horovod.runner.timeout import Timeout, TimeoutException

_log = logging.getLogger("horovod.spark")
_LOOK_SECONDS = 0.25
_REASON_SECONDS = 3.0
"""How long Spark may take to say why a task has failed."""
_CANCEL_SECONDS = 5.0
_NO_DYNAMIC_ALLOCATION = "SPARK-24942"
"""What Spark's refusal of barrier mode under dynamic allocation begins with."""
_numbers = itertools.count()


class ContextTasks:
    """Jobs of a SparkContext."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context

    @property
    def default_num_proc(self) -> int:
        return int(self._context.defaultParallelism)

    def run(self, request: TasksRequest, sinks: Mapping[str, Sink], limit: Timeout) -> TasksReply:
        """Run the tasks, in barrier mode unless Spark refuses that.

        Args:
            sinks: where the ranks' output goes, by stream.
            limit: by when all tasks must have started.

        Raises:
            horovod.runner.timeout.TimeoutException: not all tasks have started in time.
            RuntimeError: a task was lost.
        """
        with self._served(request, sinks) as asked:
            try:
                return _WatchedJob(self._context, asked, limit).run()
            except Exception as error:
                reason = next((line for line in str(error).splitlines() if _NO_DYNAMIC_ALLOCATION in line), "")
                if not reason:
                    raise
                _log.warning(
                    "Spark refuses barrier mode here, so the ranks are plain tasks, which meet at the driver: %s",
                    reason.rpartition("Exception: ")[2],
                )
            return _WatchedJob(self._context, replace(asked, barrier=False), limit).run()

    @contextmanager
    def _served(self, request: TasksRequest, sinks: Mapping[str, Sink]) -> Iterator[TasksRequest]:
        """A server for the ranks' output, and for the meeting of plain tasks. Yields the request with its address."""

        def show(key: str, text: bytes) -> None:
            with suppress(ReaderGone):
                sinks[key.removeprefix(KEY)].write(text.decode())

        secret = make_secret()
        addresses = own_addresses()
        server = RendezvousServer(secret, anywhere(addresses), expected=2 * request.size)
        for stream in sinks:
            server.pass_on(KEY + stream, show)
        server.start()
        try:
            port = server.address[1]
            names = dict.fromkeys([self._context.getConf().get("spark.driver.host", "127.0.0.1"), *addresses])
            yield replace(request, driver=tuple((name, port) for name in names), secret=secret)
        finally:
            server.stop()


class _WatchedJob:
    """One job of Spark, in a job group of its own."""

    def __init__(self, context: SparkContext, request: TasksRequest, limit: Timeout) -> None:
        self._context = context
        self._request = request
        self._limit = limit
        self._group = f"horovod.spark.run.{next(_numbers)}"
        self._found: list[bytes] = []
        self._error: Exception | None = None
        self._started = False
        self._thread = InheritableThread(target=self._submit, name="horovod-spark", daemon=True)

    def run(self) -> TasksReply:
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(_LOOK_SECONDS)
                self._look()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        if not self._found:
            raise RuntimeError(AGAIN)
        return reply_of(self._found[0])

    def _submit(self) -> None:
        """Runs on a thread of its own, so that the job group is not that of the caller's other jobs."""
        try:
            context, request = self._context, self._request
            context.setJobGroup(self._group, f"horovod.spark.run with {request.size} ranks")
            numbers = context.parallelize(range(request.size), request.size)
            body = partial(_on_partition, request)
            tasks: Any = numbers.barrier() if request.barrier else numbers
            self._found = tasks.mapPartitions(body).collect()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        """Raises if the job cannot come to a good end."""
        tracker = self._context.statusTracker()
        stages = [
            stage
            for job in tracker.getJobIdsForGroup(self._group)
            for number in getattr(tracker.getJobInfo(job), "stageIds", ())
            if (stage := tracker.getStageInfo(number)) is not None
        ]
        for stage in stages:
            self._started = self._started or stage.numActiveTasks + stage.numCompletedTasks >= self._request.size
            if stage.numFailedTasks or stage.currentAttemptId:
                raise RuntimeError(f"{AGAIN}. {self._reason(stage.stageId)}".strip())
        if self._thread.is_alive() and not self._started and self._limit.timed_out():
            raise TimeoutException(self._limit.text(f"{self._request.size} tasks of Spark to start"))

    def _reason(self, stage: int) -> str:
        """Why a task of the stage has failed, as Spark says; "" if it does not."""
        deadline = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < deadline:
            try:
                store = self._context._jsc.sc().statusStore()
                said = store.lastStageAttempt(stage).failureReason()
                if said.isDefined():
                    lines = str(said.get()).splitlines()
                    return "\n".join(["Spark says:", *(line for line in lines if not line.startswith("\tat "))])
            except Exception:  # not an interface for users, and other in another version
                return ""
            time.sleep(_LOOK_SECONDS)
        return ""

    def _end(self) -> None:
        """Cancel what is left. Spark may begin a job later that waits for executors, so a thread cancels it again then."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + _CANCEL_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._context.cancelJobGroup(self._group)
            self._thread.join(_LOOK_SECONDS)
        if self._thread.is_alive():
            threading.Thread(target=self._keep_cancelling, name="horovod-spark-cancel", daemon=True).start()

    def _keep_cancelling(self) -> None:
        while self._thread.is_alive():
            with suppress(Exception):  # the context may have been stopped
                self._context.cancelJobGroup(self._group)
            self._thread.join(1.0)


def _on_partition(request: TasksRequest, _: Iterable[int]) -> Iterator[bytes]:
    return run_in_task(request)
