"""One task of a stage, without Spark: ``python spark_task.py REQUEST INDEX ATTEMPT PORT [GPUS]``. Writes what the task yields
to ``REQUEST.INDEX``.

Its BarrierTaskContext meets those of the other tasks at a server of the test.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

from horovod.control.rendezvous.client import RendezvousClient
from horovod.runner.on_spark.tasks import TasksRequest, run_in_task
from time_limits import JOB


class Context:
    """Stands for Spark's, of a barrier stage."""

    def __init__(self, index: int, attempt: int, size: int, port: int, gpus: Sequence[str]) -> None:
        self._index, self._attempt, self._size, self._gpus = index, attempt, size, gpus
        self._client = RendezvousClient(("127.0.0.1", port), b"stage", JOB)

    def partitionId(self) -> int:
        return self._index

    def taskAttemptId(self) -> int:
        return self._attempt

    def attemptNumber(self) -> int:
        return 0

    def cpus(self) -> int:
        return 3

    def resources(self) -> dict[str, SimpleNamespace]:
        return {"gpu": SimpleNamespace(name="gpu", addresses=self._gpus)} if self._gpus else {}

    def allGather(self, message: str) -> list[str]:
        found = self._client.exchange("gather", self._index, self._size, message.encode(), JOB)
        return [each.decode() for each in found]


def main() -> None:
    path, index, attempt, port, *gpus = sys.argv[1:]
    request: TasksRequest = pickle.loads(Path(path).read_bytes())
    context = Context(int(index), int(attempt), request.size, int(port), gpus)
    spark = sys.modules["pyspark"] = ModuleType("pyspark")
    spark.BarrierTaskContext = SimpleNamespace(get=lambda: context)  # type: ignore[attr-defined]
    spark.TaskContext = spark.BarrierTaskContext  # type: ignore[attr-defined]
    Path(f"{path}.{index}").write_bytes(pickle.dumps(list(run_in_task(request))))


if __name__ == "__main__":
    main()
