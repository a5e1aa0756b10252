"""The configuration of Ray's ``TorchTrainer`` for scripts that use a process group, such as those with DDP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from ray.train import torch as ray_torch
from ray.train.backend import Backend

from horovod._torch_backend import NAME
from horovod.ray.train.in_worker import in_job
from horovod.ray.train.train_settings import backend_for


@dataclass
class TorchConfig(ray_torch.TorchConfig):  # type: ignore[misc]  # Ray has no types here
    """``TorchTrainer(train_loop, torch_config=TorchConfig(), ...)``: a process group of the back end ``horovod``.

    The group is there before the training function begins. With ``min_workers`` it goes on without ranks that are lost, and
    takes in those that Ray starts in their place.

    Attributes:
        backend: ``horovod``.
        timeout_s: seconds that a collective may take.
        nics, min_workers, reset_limit, elastic_timeout: as for :class:`~horovod.ray.train.train_settings.HorovodConfig`.

    Raises:
        ValueError: another back end, or another way for the ranks to meet is given: Ray's own configuration has those.
    """

    backend: str | None = NAME
    nics: Collection[str] | None = None
    min_workers: int | None = None
    reset_limit: int | None = None
    elastic_timeout: int = 600

    def __post_init__(self) -> None:
        if self.backend != NAME or self.init_method != "env":
            raise ValueError(
                f"horovod.ray.train.torch.TorchConfig has the back end {NAME!r} and init_method='env', not {self.backend!r} "
                f"and {self.init_method!r}: use ray.train.torch.TorchConfig for others"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        return backend_for(self.min_workers)

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        of_ray, limit = super().train_func_context, timedelta(seconds=self.timeout_s)

        @contextmanager
        def in_group() -> Iterator[None]:
            with in_job(), of_ray():
                import horovod.torch  # noqa: F401  now, since the ranks that train wait for a new one from here on

                dist.init_process_group(NAME, timeout=limit)
                yield
                if dist.is_initialized():
                    dist.destroy_process_group()

        return in_group
