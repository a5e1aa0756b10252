"""An elastic job: Ray replaces a worker that fails, and the others go on."""

from __future__ import annotations

import secrets
from typing import Any

from ray.train.v2._internal.execution.worker_group import ReplicaGroup

from horovod.ray.train import in_worker
from horovod.ray.train.fixed_backend import FixedBackend
from horovod.ray.train.train_job import JoiningWorker, RunningJob
from horovod.runner.reach import awaiting_agent

_SECONDS = 10.0
"""How long to try to connect to a worker, which waits for that."""


class ElasticBackend(FixedBackend):
    """Called by Ray's controller. Each worker is a replica group of its own.

    A rank is not Ray's number of the worker: survivors keep their order, and new ranks come last.
    """

    has_replica_groups = True
    share_cuda_visible_devices = False
    """Each worker sees its own GPUs: Ray could not share those of a replacement with the others."""

    def __init__(self) -> None:
        super().__init__()
        self._job: RunningJob | None = None
        self._group: Any = None  # of all workers
        self._shuts_down = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Let workers join the job. A group of all workers begins a job."""
        members = [self._member(*found) for found in self._attached(worker_group)]
        if self._job is None or not isinstance(worker_group, ReplicaGroup):
            self._group = worker_group
            self._job = RunningJob(backend_config, members)
        else:
            self._job.add(members)
            if self._job.ended_well:
                worker_group.execute(in_worker.skip_training)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Before Ray replaces one of several lost workers, shut down the groups of the others.

        Ray calls all groups that are not shut down, and ends the run if one of those workers is dead. Otherwise nothing is to
        be done: the launcher notices the end of each worker.
        """
        if self._job is None or self._shuts_down or not isinstance(worker_group, ReplicaGroup):
            return
        self._shuts_down = True  # this function is called for each of them
        try:
            for number in self._job.lost():
                group = self._group.get_replica_groups()[number]
                if group is not worker_group and group.is_active():
                    group.shutdown()
        finally:
            self._shuts_down = False

    @staticmethod
    def _attached(worker_group: Any) -> list[tuple[in_worker.WorkerPlace, tuple[str, int], bytes]]:
        token = secrets.token_bytes(awaiting_agent.TOKEN_BYTES)
        return [(place, address, token) for place, address in worker_group.execute(in_worker.attach, token)]

    @staticmethod
    def _member(place: in_worker.WorkerPlace, address: tuple[str, int], token: bytes) -> JoiningWorker:
        return JoiningWorker(place, awaiting_agent.connect([address], token, _SECONDS))
