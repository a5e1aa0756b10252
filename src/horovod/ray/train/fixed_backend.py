"""A job of fixed size: Ray starts all of its workers together, and after a failure again."""

from __future__ import annotations

from typing import Any

import ray
from ray.train.backend import Backend

from horovod.ray.registration import Coordinator, address_for_store
from horovod.ray.train import in_worker
from horovod.runner import worker_environment


class FixedBackend(Backend):  # type: ignore[misc]  # Ray has no types here
    """Called by Ray's controller. A rank has Ray's number of the worker."""

    share_cuda_visible_devices = True
    """Each worker sees the GPUs of all workers of its node: ``hvd.local_rank()`` counts them."""

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Give each worker its rank. Called before training functions start."""
        self._close()
        self._coordinator = coordinator = Coordinator(backend_config)
        for rank, place in enumerate(worker_group.execute(in_worker.place)):
            coordinator.register(place.host, place.node, rank)
        address, port = worker_group.execute_single(0, address_for_store)
        shared = {
            **coordinator.establish_rendezvous(),
            **worker_environment.torch_store({}, address, str(port)),
        }
        given = [
            worker_group.execute_single_async(rank, in_worker.set_variables, {**shared, **numbers})
            for rank, numbers in coordinator.finalize_registration().items()
        ]
        ray.get(given)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Called before Ray ends the workers."""
        self._close()

    def _close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
