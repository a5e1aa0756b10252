"""What the ranks of a generation tell each other when they meet in ``init()``, and what follows from it on every rank.

Each rank sends a :class:`RankInfo`. From those of all ranks every rank derives the same :class:`JobInfo`. On several hosts the
ranks then tell each other which addresses they have reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from horovod._base.config import CPU_OPERATIONS, GPU_OPERATIONS, Config
from horovod.comm.engine import MpiRanks
from horovod.comm.select import forced_host_engine
from horovod.control.mesh import Endpoint
from horovod.control.reachability import TRIAL_SECONDS, Findings, find_unreachable, without_unreachable_addresses
from horovod.control.rendezvous.messages import REACHABILITY
from horovod.control.rendezvous.rendezvous_kinds import AllGather
from horovod.core.engines import device_choice
from horovod.core.engines.device_choice import DeviceReport
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.world import FAILED, World
from horovod.core.negotiation.agreement import list_ranks
from horovod.core.worker.cpu_affinity import CpuResources, crowded, own_cpu_resources

_log = logging.getLogger("horovod.core")


class RankInfo(msgspec.Struct, array_like=True):
    """A rank's message to all others in ``init()``."""

    endpoint: Endpoint
    launched: int
    """Its rank in the launched job, of which this job may be a part."""
    generation: int
    """The number that it proposes for the generation; all ranks use the highest."""
    process_sets: list[RequestedSet]
    cpu_resources: CpuResources
    settings: dict[str, str] = {}
    """The settings that must be the same on all ranks, by environment variable."""
    node: str = ""
    """The host as its launcher names it, if local and cross ranks are derived from hosts."""
    devices: DeviceReport = msgspec.field(default_factory=DeviceReport)


_decode = msgspec.msgpack.Decoder(RankInfo).decode
_decode_findings = msgspec.msgpack.Decoder(Findings).decode
# Made on import: msgspec 0.22 has crashed when several threads made the first decoder of a type at the same time.


def own_rank_info(
    endpoint: Endpoint, world: World, config: Config, generation: int, process_sets: Sequence[RequestedSet]
) -> RankInfo:
    """The message of this rank, with what it has proposed for the generation."""
    identity = world.identity
    return RankInfo(
        endpoint,
        world.launched.rank,
        generation,
        list(process_sets),
        own_cpu_resources(identity.hostname),
        config.common(),
        world.launched.node or identity.hostname,
        device_choice.own_report(identity.rank, identity.size, config.gpu_operations, warns=identity.local_rank == 0),
    )


def exchange_rank_infos(own: RankInfo, all_gather: AllGather, seconds: float) -> list[RankInfo]:
    """All-gather the ranks' information. Every rank of the job must call it. Returns it by rank.

    Raises:
        TimeoutError, RuntimeError: ranks are missing; the message names them.
    """
    return [_decode(each) for each in all_gather("init", msgspec.msgpack.encode(own), seconds)]


@dataclass(frozen=True)
class JobInfo:
    """What follows from the messages of all ranks. The same on all ranks.

    Attributes:
        generation: the number of the generation.
        host_engine: the engine for host memory that the user has chosen, as ``Config.cpu_operations``.
        device_engine: the engine that moves the memory of GPUs; "" if tensors are staged in host memory.
        mpi: the ranks' numbers in MPI.
        crowded: on some host the ranks compute with as many threads as the host has cores.
        secret: the secret of the job.
        process_sets, cpu_resources, nodes: by rank, what it has sent.
    """

    generation: int
    host_engine: str
    device_engine: str
    mpi: MpiRanks
    crowded: bool
    secret: bytes
    process_sets: list[list[RequestedSet]]
    cpu_resources: list[CpuResources]
    nodes: list[str]

    @classmethod
    def of(cls, ranks: Sequence[RankInfo], world: World, config: Config, secret: bytes) -> JobInfo:
        """What follows from the messages of all ranks.

        Args:
            ranks: the messages, by rank.
            secret: that of the rendezvous, if rank 0 has made none.

        Raises:
            ValueError: settings that must be the same differ.
            EngineError: a forced engine cannot be used.
        """
        check_settings([each.settings for each in ranks])
        if world.communicator is None:
            mpi = MpiRanks(None, world.launched.size, tuple(each.launched for each in ranks))
        else:
            mpi = MpiRanks(world.communicator, len(ranks), tuple(range(len(ranks))))
        cpu_resources = [each.cpu_resources for each in ranks]
        return cls(
            max(each.generation for each in ranks),
            forced_host_engine(config.gpu_operations, config.cpu_operations, GPU_OPERATIONS, CPU_OPERATIONS),
            device_choice.choose([each.endpoint.host for each in ranks], [each.devices for each in ranks]),
            mpi,
            crowded(cpu_resources),
            ranks[0].endpoint.secret or secret,
            [each.process_sets for each in ranks],
            cpu_resources,
            [each.node for each in ranks],
        )


def check_settings(settings_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that the ranks agree on the settings that must be the same. Every rank calls it with the same arguments.

    Raises:
        ValueError: the settings differ; the message names the variables and each rank's values.
    """
    differences = []
    for variable in settings_by_rank[0]:
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(settings_by_rank):
            ranks.setdefault(settings.get(variable, "unknown"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {list_ranks(having)}" for value, having in ranks.items())
            differences.append(f"{variable} is {values}")
    if differences:
        raise ValueError(
            f"{FAILED}: settings that must be the same on all ranks differ: {'; '.join(differences)}. Set the environment "
            "variable to one value on all ranks, or on none."
        )


def reachable_endpoints(
    own: Endpoint, endpoints: Sequence[Endpoint], all_gather: AllGather, deadline: float
) -> list[Endpoint]:
    """The endpoints without the addresses that lead nowhere. Every rank of a job on several hosts must call it.

    Args:
        own: this rank's endpoint.
        endpoints: by rank, its endpoint.
        deadline: ``time.monotonic`` by which all ranks must have tried.

    Raises:
        UnreachableError: some hosts cannot reach each other; the same on all ranks.
        TimeoutError, RuntimeError: a rank has ended meanwhile.
    """
    left = max(0.1, deadline - time.monotonic())
    found = find_unreachable(own, endpoints, min(TRIAL_SECONDS, left / 2))
    every = [_decode_findings(each) for each in all_gather(REACHABILITY, msgspec.msgpack.encode(found), left)]
    reachable = without_unreachable_addresses(endpoints, every)
    for host, failed in found.items():
        for address, why in failed.items():
            _log.warning("no rank uses address %s of %s: %s cannot reach it (%s)", address, host, own.host, why)
    return reachable
