"""What a user of Ray Train may set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

from horovod.ray.settings import MiniSettings
from horovod.ray.train.elastic_backend import ElasticBackend
from horovod.ray.train.fixed_backend import FixedBackend
from horovod.ray.train.in_worker import in_job


def backend_for(min_workers: int | None) -> type[Backend]:
    """The class that Ray's controller uses.

    Raises:
        ValueError: it is not a number of workers.
    """
    if min_workers is not None and min_workers < 1:
        raise ValueError(f"min_workers must be at least 1, not {min_workers}; without it the job has a fixed size")
    return FixedBackend if min_workers is None else ElasticBackend


@dataclass
class HorovodConfig(MiniSettings, BackendConfig):  # type: ignore[misc]  # Ray has no types here
    """``DataParallelTrainer(train_loop, backend_config=HorovodConfig(), ...)``: the workers are the ranks of one job.

    Attributes:
        min_workers: None: after a failure Ray starts all workers again, if its ``FailureConfig`` allows that, and the training
            function finds the last checkpoint by ``ray.train.get_checkpoint()``. A number: the training function uses
            ``hvd.elastic.run``. After a failure the other workers go on at once if there are so many, and the worker that Ray
            starts in place of the failed one joins them.
        reset_limit: with ``min_workers``: how many rounds may follow the first; None for any number.
        elastic_timeout: with ``min_workers``: seconds to wait for so many.

    The other attributes are those of :class:`~horovod.ray.settings.MiniSettings`; ``nics`` has an effect.
    """

    min_workers: int | None = None
    reset_limit: int | None = None
    elastic_timeout: int = 600

    @property
    def backend_cls(self) -> type[Backend]:
        return backend_for(self.min_workers)

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        return in_job
