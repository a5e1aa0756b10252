"""Finds what runs tasks: the active SparkContext, or a session of Spark Connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from horovod.runner.on_spark.tasks import TasksReply, TasksRequest
from horovod.runner.output.output import Sink
from horovod.runner.timeout import Timeout
from horovod.spark.spark_connect import ConnectTasks

NONE_ACTIVE = "Could not find an active SparkContext, are you running in a PySpark session?"


class SparkTasks(Protocol):
    """Runs tasks: :class:`~horovod.spark.spark_context.ContextTasks` or
    :class:`~horovod.spark.spark_connect.ConnectTasks`."""

    @property
    def default_num_proc(self) -> int:
        """The number of tasks if the user gives none."""

    def run(self, request: TasksRequest, sinks: Mapping[str, Sink], limit: Timeout) -> TasksReply:
        """Run the tasks, and wait for the reply of that of partition 0."""


def active() -> SparkTasks:
    """What runs tasks.

    Raises:
        Exception: there is neither.
    """
    session = _connect_session()
    if session is not None:
        return ConnectTasks(session)
    try:
        from pyspark import SparkContext
    except ImportError as error:  # the package of Spark Connect alone has none
        raise Exception(NONE_ACTIVE) from error
    context = SparkContext._active_spark_context
    if context is None:
        raise Exception(NONE_ACTIVE)
    from horovod.spark.spark_context import ContextTasks

    return ContextTasks(context)


def _connect_session() -> Any:
    """The session of Spark Connect, if this process works with one. It may run the server, too, and so have a SparkContext."""
    from pyspark.sql.utils import is_remote

    if not is_remote():
        return None
    from pyspark.sql.connect.session import SparkSession

    return SparkSession.getActiveSession() or SparkSession.active()
