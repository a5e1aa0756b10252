"""The ranks of a job that is not elastic, as actors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from horovod._base import config
from horovod.core.errors import HorovodInternalError
from horovod.ray.base_worker import BaseHorovodWorker, Executable
from horovod.ray.placement import Placement, WorkerSpec, by_node
from horovod.ray.ray_logger import Callback, call_all
from horovod.ray.registration import Coordinator, address_for_store
from horovod.ray.settings import MiniSettings
from horovod.runner import worker_environment
from horovod.runner.timeout import Timeout, TimeoutException

_log = logging.getLogger("horovod.ray")
_SECONDS_FOR_OTHERS = 10.0
"""How long the other ranks may take to fail, too, after the first has failed: the one that failed by itself is to be found."""


class Workers:
    """Starts them, calls functions on them, and ends them. An actor itself if the caller is a Ray client."""

    def __init__(self, settings: MiniSettings, spec: WorkerSpec) -> None:
        self._settings = settings
        self._spec = spec
        self._coordinator = Coordinator(settings)
        self._placement: Placement | None = None
        self._workers: list[Any] = []
        self._names: list[str] = []
        self._callbacks: Sequence[Callback] = ()

    def start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        if self._workers:
            raise RuntimeError("this executor has been started already; call shutdown() before another start()")
        ranks = range(self._spec.workers)
        self._coordinator = Coordinator(self._settings, lambda value: call_all(self._callbacks, value))
        self._placement = Placement(self._spec, self._settings.placement_group_timeout_s)
        try:
            limit = self._settings.start_timeout
            actor = ray.remote(BaseHorovodWorker)
            self._workers = made = [
                actor.options(**self._placement.options(each)).remote(each, len(ranks)) for each in ranks
            ]
            nodes = _in_time([each.node_id.remote() for each in made], limit, "the workers to start")
            self._workers = [made[each] for each in by_node(nodes)]
            names = _in_time([each.hostname.remote() for each in self._workers], limit, "the workers' host names")
            self._names = [f"rank {rank} on {name}" for rank, name in enumerate(names)]
            for rank, (name, node) in enumerate(zip(names, sorted(nodes, key=nodes.index), strict=True)):
                self._coordinator.register(name, node, rank)
            store = self._workers[0].execute.remote(lambda _: address_for_store())
            ((address, port),) = _in_time([store], limit, "an address of rank 0")
            of_torch = worker_environment.torch_store(variables, address, str(port))
            shared = {**self._coordinator.establish_rendezvous(), **of_torch, **variables}
            numbers = self._coordinator.finalize_registration()
            gpus = self._gpus([numbers[rank][config.HOSTNAME] for rank in ranks], limit)
            environments = [{**shared, **numbers[rank], **gpus[rank]} for rank in ranks]
            updates = [each.update_env_vars.remote(env) for each, env in zip(self._workers, environments, strict=True)]
            _in_time(updates, limit, "the workers to take their variables")
            _results([each.start_executable.remote(*executable.parts) for each in self._workers], self._names)
        except BaseException:
            self.shutdown()
            raise

    def _gpus(self, nodes: Sequence[str], limit: Timeout) -> list[dict[str, str]]:
        """For each rank, all GPUs of the ranks of its node: ``hvd.local_rank()`` counts them."""
        if not self._spec.gpus:
            return [{}] * len(nodes)
        given = _in_time([each.get_gpu_ids.remote() for each in self._workers], limit, "the workers' GPUs")
        return [
            {
                "CUDA_VISIBLE_DEVICES": ",".join(
                    dict.fromkeys(
                        gpu for other, gpus in zip(nodes, given, strict=True) if other == node for gpu in gpus
                    )
                )
            }
            for node in nodes
        ]

    def submit(self, function: Callable[[Any], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """The references of the values of ``function(executable)`` on these ranks, or on all."""
        if not self._workers:
            raise RuntimeError("this executor has not been started: call start() first")
        chosen = self._workers if ranks is None else [self._workers[rank] for rank in ranks]
        return [each.execute.remote(function) for each in chosen]

    def execute(
        self,
        function: Callable[[Any], Any],
        callbacks: Sequence[Callback] = (),
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        self._callbacks = callbacks
        names = self._names if ranks is None else [self._names[rank] for rank in ranks]
        return _results(self.submit(function, ranks), names)

    def shutdown(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        self._coordinator.close()
        if self._placement is not None:
            self._placement.release()
            self._placement = None


def _in_time(references: Sequence[Any], limit: Timeout, activity: str) -> list[Any]:
    """The values, within the limit."""
    _, late = ray.wait(list(references), num_returns=len(references), timeout=limit.remaining())
    if late:
        raise TimeoutException(limit.text(activity))
    return list(ray.get(list(references)))


def _results(references: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The values, by worker.

    Args:
        names: of the workers, for the log: errors of Ray do not name the rank.

    Raises:
        The error of the rank that failed by itself, if some failed because of it.
    """
    waiting, errors = list(references), dict[int, Exception]()
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=_SECONDS_FOR_OTHERS if errors else None)
        if not ready:
            break
        for each in ready:
            try:
                ray.get(each)
            except (RayTaskError, RayActorError) as error:
                errors[list(references).index(each)] = error
    if not errors:
        return list(ray.get(list(references)))
    first = min([number for number, error in errors.items() if not _is_of_others(error)] or errors)
    _log.error("%s failed first; %d of %d ranks have failed", names[first], len(errors), len(names))
    raise errors[first]


def _is_of_others(error: Exception) -> bool:
    """Whether a collective has raised it, because another rank had failed."""
    return isinstance(getattr(error, "cause", error), HorovodInternalError)
