"""How the ranks of a generation get to know each other: where they meet, and what each tells about itself there."""

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
    """What a rank brings to the meeting in ``init()``."""

    endpoint: Endpoint
    launched: int
    """Its number in the launched job, of which this job may be a part."""
    generation: int
    """The number it would give the generation that begins; the highest becomes everybody's."""
    process_sets: list[RequestedSet]
    cpu_resources: CpuResources
    settings: dict[str, str] = {}
    """Those that must be the same on all ranks, by environment variable."""


_decode = msgspec.msgpack.Decoder(RankInfo).decode
# Made on import: where several threads make the first decoder of a type at the same time, msgspec 0.22 was seen to crash.


def exchange_rank_infos(
    own: RankInfo, world: World, place: RendezvousPoint | None, attempt: int, seconds: float
) -> list[RankInfo]:
    """Everybody's introduction, by rank; every rank of the job must call it.

    Args:
        place: where to meet; None for a job of one, and for one that meets over its communicator.
        attempt: how often these ranks have met before.

    Raises:
        TimeoutError, RuntimeError: the ranks did not find each other; the message says who is missing.
    """
    identity = world.identity
    if identity.size == 1:
        return [own]
    body = msgspec.msgpack.encode(own)
    if place is None:
        bodies = rendezvous_over_mpi.exchange(world.communicator, body, seconds)
    else:
        bodies = exchange(place, attempt, identity.rank, identity.size, body, seconds, world.listed)
    return [_decode(each) for each in bodies]


def check_settings(settings_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Whether the ranks agree on all settings that they must agree on. Called by every rank with the same arguments.

    Raises:
        ValueError: they do not; names the variables, and which ranks have which values.
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
    """Where the ranks of the launched job can meet.

    Raises:
        ValueError: the launcher said neither a place nor enough to find one.
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
        f"no place to meet. Set {RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT} and {SECRET_KEY}, start the job with horovodrun, or "
        "pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)."
    )
