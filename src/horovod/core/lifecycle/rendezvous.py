"""How the ranks of a generation get to know each other: where they meet, and what each tells about itself there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control import rendezvous_over_mpi
from horovod.control.meeting_on_hosts import PlaceOnHosts
from horovod.control.mesh import Endpoint
from horovod.control.munge import MungeError
from horovod.control.reachability import Findings, usable
from horovod.control.rendezvous_point import RendezvousPoint, exchange, point_on_this_host
from horovod.control.secret import decode_secret
from horovod.core.config import RENDEZVOUS_ADDRESS, RENDEZVOUS_PORT, SECRET_KEY
from horovod.core.coordination.agreement import list_ranks
from horovod.core.execution.cpu_affinity import CpuResources
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.world import FAILED, World
from horovod.environments import HostList, Identity, host_list
from horovod.environments.slurm_address import address_of


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
_decode_findings = msgspec.msgpack.Decoder(Findings).decode
# Made on import: where several threads make the first decoder of a type at the same time, msgspec 0.22 was seen to crash.


def exchange_rank_infos(
    own: RankInfo, world: World, place: RendezvousPoint | PlaceOnHosts | None, attempt: int, seconds: float
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
    elif isinstance(place, PlaceOnHosts):
        bodies = place.exchange(attempt, identity.rank, identity.size, body, seconds, world.listed)
    else:
        bodies = exchange(place, attempt, identity.rank, identity.size, body, seconds, world.listed)
    return [_decode(each) for each in bodies]


def compare_findings(
    own: Findings,
    endpoints: Sequence[Endpoint],
    world: World,
    place: RendezvousPoint | None,
    attempt: int,
    seconds: float,
) -> list[Endpoint]:
    """The cards without addresses that turned out to be useless; every rank of a job on several hosts must call it.

    Args:
        own: what this rank has found out about the way to other hosts.

    Raises:
        UnreachableError: some hosts cannot reach each other; the same on all ranks.
        TimeoutError, RuntimeError: a rank has gone meanwhile.
    """
    identity, body = world.identity, msgspec.msgpack.encode(own)
    if place is None:
        bodies = rendezvous_over_mpi.exchange(world.communicator, body, seconds)
    else:
        bodies = exchange(place, attempt, identity.rank, identity.size, body, seconds, world.listed, "reachability")
    return usable(endpoints, [_decode_findings(each) for each in bodies])


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


def rendezvous_point(launched: Identity, env: Mapping[str, str] | None = None) -> RendezvousPoint | PlaceOnHosts:
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
    listed = host_list(variables)
    if listed is not None:
        return _place_on_hosts(launched, listed, variables.get(SECRET_KEY, ""))
    raise ValueError(
        f"Horovod initialization failed: {launched.launcher} started {launched.size} ranks on several hosts and gave them "
        f"no place to meet. Set {RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT} and {SECRET_KEY}, start the job with horovodrun, or "
        "pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)."
    )


def _place_on_hosts(launched: Identity, listed: HostList, key: str) -> PlaceOnHosts:
    secret = decode_secret(key) if key else b""
    try:
        return PlaceOnHosts(launched.job, listed.hosts, listed.of_rank_0, listed.ports, secret, address_of)
    except MungeError as error:
        raise ValueError(
            f"Horovod initialization failed: {launched.launcher} started {launched.size} ranks on several hosts, and they "
            f"cannot prove to one another that they are of one user: MUNGE cannot be used here, {error}. Give them a secret "
            f"before they are started: export {SECRET_KEY}=$(head -c 32 /dev/urandom | base64). Or start the job with "
            "horovodrun."
        ) from None
