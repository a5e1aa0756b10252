"""The exchange of ``init()``: where the ranks of a generation find each other, and what each tells all others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from horovod.control import rendezvous_over_mpi
from horovod.control.mesh import Endpoint
from horovod.control.rendezvous_point import RendezvousPoint, exchange, point_on_this_host
from horovod.control.secret import decode_secret
from horovod.core.config import RENDEZVOUS_ADDRESS, RENDEZVOUS_PORT, SECRET_KEY
from horovod.core.coordination.agreement import list_ranks
from horovod.core.execution.cpu_affinity import CpuResources
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.world import FAILED, World

if TYPE_CHECKING:
    from horovod.environments import Identity


class RankInfo(msgspec.Struct, array_like=True):
    """What a rank tells all others in ``init()``."""

    endpoint: Endpoint
    launched: int
    """Its rank in the launched job, of which this job may be a part."""
    generation: int
    """The number that it proposes for the generation; all ranks use the highest."""
    process_sets: list[RequestedSet]
    cpu_resources: CpuResources
    settings: dict[str, str] = {}
    """The settings that must be the same on all ranks, by environment variable."""


_decode = msgspec.msgpack.Decoder(RankInfo).decode
# Made on import: msgspec 0.22 has crashed where several threads made the first decoder of a type at the same time.


def exchange_rank_infos(
    own: RankInfo, world: World, point: RendezvousPoint | None, calls: int, seconds: float
) -> list[RankInfo]:
    """All-gather the ranks' information. Every rank of the job must call it. Returns it by rank.

    Args:
        point: where the rendezvous server is; None for a job of one rank, and for a job made from a communicator.
        calls: how often ``init()`` was called with these ranks.

    Raises:
        TimeoutError, RuntimeError: ranks are missing; the message names them.
    """
    identity = world.identity
    if identity.size == 1:
        return [own]
    body = msgspec.msgpack.encode(own)
    if point is None:
        bodies = rendezvous_over_mpi.exchange(world.communicator, body, seconds)
    else:
        bodies = exchange(point, calls, identity.rank, identity.size, body, seconds, world.listed)
    return [_decode(each) for each in bodies]


def check_settings(settings_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that the ranks agree on the settings that must be the same. Every rank calls it with the same arguments.

    Raises:
        ValueError: they do not; the message names the variables and each rank's values.
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


def rendezvous_point(launched: Identity, env: Mapping[str, str] | None = None) -> RendezvousPoint:
    """Where the ranks of the launched job find each other.

    Raises:
        ValueError: the launcher named no rendezvous server, and the ranks are not all on one host.
    """
    variables = os.environ if env is None else env
    address, port = variables.get(RENDEZVOUS_ADDRESS), variables.get(RENDEZVOUS_PORT)
    if address and port:
        if SECRET_KEY not in variables:
            raise ValueError(f"{RENDEZVOUS_ADDRESS} is set but {SECRET_KEY} is not; ranks cannot prove who they are")
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"environment variable {RENDEZVOUS_PORT}={port!r}: expected the number of a port")
        return RendezvousPoint((address, int(port)), decode_secret(variables[SECRET_KEY]), hosted=False)
    if launched.local_size == launched.size and launched.job:
        return point_on_this_host(launched.job)
    raise ValueError(
        f"Horovod initialization failed: {launched.launcher} started {launched.size} ranks on several hosts and gave them "
        f"no rendezvous server. Set {RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT} and {SECRET_KEY}, start the job with "
        "horovodrun, or pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)."
    )
