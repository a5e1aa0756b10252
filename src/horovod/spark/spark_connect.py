"""Runs the tasks as a query of Spark Connect: a stage in barrier mode under ``mapInArrow``.

The client cannot be reached from the tasks, so the ranks' output comes with the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from horovod.runner.on_spark.tasks import AGAIN, TasksReply, TasksRequest, reply_of, run_in_task
from horovod.runner.output.output import Sink
from horovod.runner.timeout import Timeout


class ConnectTasks:
    """Queries of a session of Spark Connect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def default_num_proc(self) -> int:
        number = self._session.conf.get("spark.default.parallelism", None)
        if number is None:
            raise ValueError("num_proc is missing: Spark Connect does not say how many tasks run at a time")
        return int(number)

    def run(self, request: TasksRequest, sinks: Mapping[str, Sink], limit: Timeout) -> TasksReply:
        """Run the tasks. See :meth:`horovod.spark.spark_context.ContextTasks.run`; ``limit`` is Spark's own here."""
        session = self._session

        def on_partition(batches: Iterable[Any]) -> Iterator[Any]:  # Spark wants a function with a name
            return _on_batches(request, batches)

        numbers = session.range(0, request.size, 1, request.size)
        rows = None
        session.addTag(request.name)
        try:
            rows = numbers.mapInArrow(on_partition, "reply binary", barrier=True).collect()
        finally:
            session.removeTag(request.name)
            if rows is None:
                session.interruptTag(request.name)
        if not rows:
            raise RuntimeError(AGAIN)
        return reply_of(bytes(rows[0][0]))


def _on_batches(request: TasksRequest, batches: Iterable[Any]) -> Iterator[Any]:
    import pyarrow

    for _ in batches:
        pass
    for reply in run_in_task(request):
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([reply], type=pyarrow.binary())], ["reply"])
