"""How the ranks of a generation get to know each other: where they meet, and what each tells about itself there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control import meeting_over_pmi, rendezvous_over_mpi
from horovod.control.mesh import Endpoint
from horovod.control.rendezvous_point import RendezvousPoint, exchange, point_on_this_host
from horovod.control.secret import decode_secret
from horovod.core.config import RENDEZVOUS_ADDRESS, RENDEZVOUS_PORT, SECRET_KEY
from horovod.core.coordination.agreement import list_ranks
from horovod.core.execution.cpu_affinity import CpuResources
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.world import FAILED, World
from horovod.environments import Identity
from horovod.environments.mpich import MPICH
from horovod.environments.open_mpi import OpenMPI
from horovod.environments.pals import PALS


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


_MPI_LAUNCHERS = frozenset({OpenMPI.name, MPICH.name, PALS.name})
"""Those whose ranks can reach one another through MPI, or through what MPI itself is started by."""

_decode = msgspec.msgpack.Decoder(RankInfo).decode
# Made on import: where several threads make the first decoder of a type at the same time, msgspec 0.22 was seen to crash.


def exchange_rank_infos(
    own: RankInfo, world: World, place: RendezvousPoint | None, attempt: int, seconds: float
) -> list[RankInfo]:
    """Everybody's introduction, by rank; every rank of the job must call it.

    Args:
        place: where to meet; None for a job of one, and for one that meets over its communicator or through its launcher.
        attempt: how often these ranks have met before.

    Raises:
        TimeoutError, RuntimeError: the ranks did not find each other; the message says who is missing.
    """
    identity = world.identity
    if identity.size == 1:
        return [own]
    body = msgspec.msgpack.encode(own)
    if world.communicator is not None:
        bodies = rendezvous_over_mpi.exchange(world.communicator, body, seconds)
    elif place is None:
        bodies = _exchange_through_launcher(world, body, seconds)
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


def rendezvous_point(launched: Identity, env: Mapping[str, str] | None = None) -> RendezvousPoint | None:
    """Where the ranks of the launched job can meet; None where MPI's launcher passes on what they tell one another.

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
    if launched.launcher in _MPI_LAUNCHERS:
        if meeting_over_pmi.DESCRIPTOR in variables or rendezvous_over_mpi.obtainable():
            return None
        advice = "install mpi4py for the Python of every rank (pip install mpi4py), start the job with horovodrun --mpi"
    else:
        advice = "start the job with horovodrun, or pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)"
    raise ValueError(
        f"{FAILED}: {launched.launcher} started {launched.size} ranks on several hosts and gave them no place to meet. To "
        f"have them meet, {advice}, or set {RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT} and {SECRET_KEY}."
    )


def _exchange_through_launcher(world: World, body: bytes, seconds: float) -> list[bytes]:
    """All-gather over everything that was launched, where :func:`rendezvous_point` has found no other way.

    MPI comes first where the script has it already, and last otherwise: to initialize it takes time, and cannot be bounded.
    """
    launched = world.launched
    if world.listed:
        raise ValueError(
            f"{FAILED}: comm={list(world.listed)}: where {launched.launcher} starts ranks on several hosts, a list of ranks "
            "needs a place to meet. Pass a communicator, as in hvd.init(comm=MPI.COMM_WORLD.Split(color)), or start the job "
            "with horovodrun --mpi."
        )
    descriptor = os.environ.get(meeting_over_pmi.DESCRIPTOR, "")
    if descriptor.isdecimal() and not rendezvous_over_mpi.is_running():
        return meeting_over_pmi.exchange(int(descriptor), launched.rank, launched.size, body, seconds)
    return rendezvous_over_mpi.exchange(
        rendezvous_over_mpi.world(launched.size, launched.launcher), body, seconds, "hvd.init()"
    )
