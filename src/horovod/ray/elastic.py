"""Elastic jobs on Ray: the nodes of the cluster are the hosts, and each round has those that are alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from horovod.control.rendezvous.server import RendezvousServer
from horovod.ray.agents import RayConnection
from horovod.ray.ray_logger import KEY, Callback, call_all
from horovod.ray.settings import ElasticSettings
from horovod.runner.agent.base import Agent, Report
from horovod.runner.agent.messages import Prepare
from horovod.runner.children import Cleanup
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.elastic_job import ElasticJob
from horovod.runner.event_loop import Loop
from horovod.runner.function import run_function
from horovod.runner.hosts.host_sources import ChangingHosts, HostSource
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.options import Options
from horovod.runner.reach.reach import launcher_addresses, working_directory
from horovod.runner.reach.remote import RemoteAgent


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster that are alive, each with a slot for every ``cpus_per_slot`` CPUs that it has in all.

    Args:
        use_gpu: a slot needs ``gpus_per_slot`` GPUs, too.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The slots of each node, by its address."""
        return {address: slots for address, slots, _ in self.nodes()}

    def nodes(self) -> list[tuple[str, int, str]]:
        """The address, the slots and Ray's number of each node."""
        found = []
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            slots = int(resources.get("CPU", 0) // self.cpus_per_slot)
            if self.use_gpu:
                slots = min(slots, int(resources.get("GPU", 0) // self.gpus_per_slot))
            if slots:
                found.append((node["NodeManagerAddress"], slots, node["NodeID"]))
        return found

    def resources(self, slots: int) -> dict[str, float]:
        """What so many slots take, as options of an actor."""
        return {"num_cpus": slots * self.cpus_per_slot, "num_gpus": slots * self.gpus_per_slot if self.use_gpu else 0}


class _Nodes(ChangingHosts):
    """What a discovery finds, as hosts of a job."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery

    def hosts(self, ranks: int, cancel: int = -1) -> list[HostInfo]:
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except ray.exceptions.RayError as error:
            raise ValueError(f"Ray does not say which nodes it has: {error}") from None
        return [HostInfo(name, slots) for name, slots in found.items() if slots]


class RayJob(ElasticJob):
    """An elastic job whose hosts are nodes of a Ray cluster. See :class:`ElasticJob`.

    Args:
        discovery: finds the nodes.
        callbacks: called with each value that rank 0 logs.
    """

    def __init__(
        self,
        options: Options,
        environment: Mapping[str, str],
        *,
        hosts_python: bool = False,
        discovery: HostDiscovery,
        reserved: RayHostDiscovery,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._discovery = discovery
        self._reserved = reserved
        self._callbacks = callbacks
        super().__init__(options, environment, hosts_python=hosts_python)

    def _find_source(self, options: Options, environment: Mapping[str, str]) -> HostSource:
        return _Nodes(self._discovery)

    def _is_here(self, host: HostInfo) -> bool:
        return False  # Ray must know of all processes, those on this node too

    def _make_server(self, cleanup: Cleanup, published: Mapping[str, bytes]) -> tuple[RendezvousServer, str]:
        server, secret = super()._make_server(cleanup, published)
        server.pass_on(KEY, lambda _, value: call_all(self._callbacks, value))
        return server, secret

    def _reach(self, host: HostInfo, loop: Loop, report: Report, secret: str, port: int) -> Agent:
        numbers = {address: number for address, _, number in self._reserved.nodes()}
        connection = RayConnection(
            numbers.get(host.hostname, host.hostname), self._reserved.resources(host.slots), self._seconds
        )
        addresses = [(address, port) for address in launcher_addresses(self._options)]
        begin = Prepare(secret, working_directory(self._launcher_environment), addresses, self._seconds / 2)
        return RemoteAgent(host.hostname, loop, report, connection, begin)


def run_elastic(
    function: Callable[..., Any],
    settings: ElasticSettings,
    reserved: RayHostDiscovery,
    variables: Mapping[str, str],
    callbacks: Sequence[Callback],
) -> list[Any]:
    """Call ``function()`` on the ranks of an elastic job on the cluster. Returns the values by rank.

    If the caller is a Ray client, a task in the cluster is the launcher, and calls ``callbacks``: the ranks must reach it.
    """
    if ray.util.client.ray.is_connected():
        run: Any = ray.remote(num_cpus=0)(run_elastic)
        return list(ray.get(run.remote(function, settings, reserved, variables, callbacks)))
    options = Options(
        min_num_proc=settings.min_num_proc,
        max_num_proc=settings.max_num_proc,
        reset_limit=settings.reset_limit,
        elastic_timeout=settings.elastic_timeout,
        cooldown_range=settings.cooldown_range,
        nics=tuple(settings.nics or ()),
    )
    discovery = settings.discovery or reserved
    make = partial(RayJob, discovery=discovery, reserved=reserved, callbacks=callbacks)

    def make_job(wanted: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> RayJob:
        return make(wanted, {**environment, **variables}, hosts_python=hosts_python)

    return run_function(function, (), {}, options, None, make_job)


class ElasticRayExecutor:
    """The elastic executor of earlier versions; :class:`RayExecutor` with ``min_workers`` is the same.

    Args:
        settings: of :meth:`create_settings`.
        env_vars: variables of all ranks.
        override_discovery: find hosts by :class:`RayHostDiscovery`, and not by ``settings.discovery``.
    """

    @classmethod
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """``min_np`` and ``max_np`` are old names of ``min_num_proc`` and ``max_num_proc``."""
        return ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise ValueError("gpus_per_slot is set, but use_gpu is False. Set use_gpu=True.")
        self._settings = settings
        self._reserved = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot or 1)
        if override_discovery:
            settings.discovery = self._reserved
        self._variables = dict(env_vars or {})

    def start(self) -> None:
        """Nothing is started before :meth:`run`."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """``worker_fn()`` on every rank. Returns the values by rank.

        Raises:
            RuntimeError: the job failed; the message holds the reason.
        """
        return run_elastic(worker_fn, self._settings, self._reserved, self._variables, callbacks or ())
