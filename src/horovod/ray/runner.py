"""Runs functions on ranks that Ray starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from horovod.ray.base_worker import BaseHorovodWorker, Executable
from horovod.ray.elastic import RayHostDiscovery, run_elastic
from horovod.ray.placement import WorkerSpec
from horovod.ray.ray_logger import Callback
from horovod.ray.registration import Coordinator
from horovod.ray.settings import ElasticSettings, MiniSettings
from horovod.ray.workers import Workers

__all__ = ["BaseHorovodWorker", "Coordinator", "MiniSettings", "RayExecutor"]


class RayExecutor:
    """Runs functions on ranks that are Ray actors, which stay until :meth:`shutdown`. Source: ``horovod.ray`` of Horovod 0.28.

    The functions call ``hvd.init()`` as any script does. A rank whose function raises leaves the job with that error; the other
    ranks get it from their collectives, and the caller gets the error of the rank that failed by itself.

    With ``min_workers`` the job is elastic: the nodes of the cluster are its hosts, and each :meth:`run` starts a job on those
    that are alive. Its processes are children of an agent on each node, which takes the resources of the node's ranks.

    Args:
        settings: of :meth:`create_settings`.
        num_workers: the number of ranks; Ray packs them onto as few hosts as it can.
        num_hosts, num_workers_per_host: instead, so many ranks on each of so many hosts.
        cpus_per_worker, gpus_per_worker: what Ray reserves for each; one GPU if ``use_gpu`` is true and no number is given.
        use_current_placement_group: run inside the placement group of the calling task or actor, if it has one.
        min_workers, max_workers: of an elastic job: how many ranks it has at least, and at most.
        reset_limit, cooldown_range, elastic_timeout: of an elastic job: how many rounds may follow the first; the shortest and
            the longest time in seconds for which a node is left out after a failure; seconds to wait for enough nodes.
        override_discovery: find the nodes by :class:`RayHostDiscovery`, and not by ``settings.discovery``.

    Raises:
        ValueError: the arguments contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> MiniSettings:
        """Settings of an executor. ``ssh_identity_file`` and ``ssh_str`` are accepted for compatibility: no ssh is used."""
        return MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and (min_workers is None or min_workers < 1):
            raise ValueError("max_workers is set, so min_workers must be a positive number")
        if min_workers and num_workers:
            raise ValueError("num_workers is for jobs of a fixed size: leave it out, or min_workers")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False. Set use_gpu=True.")
        if use_gpu and gpus_per_worker is not None and gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker must be at least 1, not {gpus_per_worker}")
        if num_workers and num_hosts:
            raise AssertionError("Either num_workers or num_hosts should be set, and not both.")
        self._adapter: _Static | _Elastic
        if min_workers:
            reserved = RayHostDiscovery(use_gpu, cpus_per_worker, gpus_per_worker or 1)
            elastic = ElasticSettings(
                **{each.name: getattr(settings, each.name) for each in dataclasses.fields(MiniSettings)},
                min_num_proc=min_workers,
                max_num_proc=max_workers,
                reset_limit=reset_limit,
                elastic_timeout=elastic_timeout,
                cooldown_range=cooldown_range,
                discovery=reserved if override_discovery else getattr(settings, "discovery", None),
            )
            self._adapter = _Elastic(elastic, reserved)
            return
        if not num_workers and not num_hosts:
            raise ValueError("how many ranks? Set num_workers, or num_hosts and num_workers_per_host, or min_workers")
        if num_workers_per_host < 1:
            raise ValueError(f"num_workers_per_host must be at least 1, not {num_workers_per_host}")
        self._adapter = _Static(
            settings,
            WorkerSpec(
                workers=num_workers or (num_hosts or 0) * num_workers_per_host,
                workers_per_host=num_workers_per_host if num_hosts else None,
                cpus=cpus_per_worker,
                gpus=(gpus_per_worker or 1) if use_gpu else 0,
                use_current=use_current_placement_group,
            ),
        )

    @property
    def num_workers(self) -> int:
        """The number of ranks; of an elastic job the least."""
        return self._adapter.size

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks. Each makes its object ``executable_cls(*executable_args, **executable_kwargs)``.

        Raises:
            TimeoutException: Ray had no room for them in time, or they did not start in time.
        """
        given = Executable(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        self._adapter.start(given, dict(extra_env_vars or {}))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """``fn(executable)`` on every rank. Returns the values by rank.

        Args:
            callbacks: called with each value that rank 0 gives to :func:`horovod.ray.ray_logger.log`; for a Ray client, in the
                actor that stands for it.
        """
        return self._adapter.execute(fn, tuple(callbacks or ()))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank. Returns the values by rank."""
        return self.execute(_without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As :meth:`run`, but returns references of the values at once; ``ray.get`` waits for them.

        Raises:
            NotImplementedError: the job is elastic, so the number of values is not known.
        """
        return self._adapter.submit(_without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """``fn(executable)`` on rank 0.

        Raises:
            NotImplementedError: the job is elastic, so no rank stays between calls.
        """
        return self._adapter.execute_single(fn)

    def shutdown(self) -> None:
        """End the ranks, and give back what Ray has reserved. Idempotent."""
        self._adapter.shutdown()


class _Static:
    """Actors that stay. If the caller is a Ray client, an actor in the cluster manages them, since they must reach it."""

    def __init__(self, settings: MiniSettings, spec: WorkerSpec) -> None:
        self.size = spec.workers
        self._remote = ray.util.client.ray.is_connected()
        make: Any = ray.remote(num_cpus=0)(Workers).remote if self._remote else Workers
        self._workers = make(settings, spec)

    def start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        self._call("start", executable, variables)

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callback]) -> list[Any]:
        return list(self._call("execute", function, callbacks))

    def submit(self, function: Callable[[Any], Any]) -> list[Any]:
        return list(self._call("submit", function))

    def execute_single(self, function: Callable[[Any], Any]) -> Any:
        return self._call("execute", function, (), [0])[0]

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._workers, method)
        return ray.get(call.remote(*arguments)) if self._remote else call(*arguments)


class _Elastic:
    """Each call is a job."""

    def __init__(self, settings: ElasticSettings, reserved: RayHostDiscovery) -> None:
        self.size = settings.min_num_proc
        self._settings = settings
        self._reserved = reserved
        self._executable = Executable()
        self._variables: Mapping[str, str] = {}

    def start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        self._executable, self._variables = executable, variables

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callback]) -> list[Any]:
        executable = self._executable
        return run_elastic(
            lambda: function(executable.make()), self._settings, self._reserved, self._variables, callbacks
        )

    def submit(self, function: Callable[[Any], Any]) -> list[Any]:
        raise NotImplementedError("run_remote: an elastic job has no fixed number of values; use run")

    def execute_single(self, function: Callable[[Any], Any]) -> Any:
        raise NotImplementedError("execute_single: an elastic job has no rank that stays between calls; use run")

    def shutdown(self) -> None:
        """Nothing is left after a call."""


def _without_executable(
    function: Callable[..., Any], arguments: Sequence[Any] | None, keywords: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    given, named = tuple(arguments or ()), dict(keywords or {})
    return lambda _: function(*given, **named)
