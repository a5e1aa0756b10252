"""How the ranks of a generation get to know each other: where they meet, and what each tells about itself there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control import meeting_over_pmi, rendezvous_over_mpi
from horovod.control.meeting_at_rank_0 import Directory, KnownAddress, PlaceAtRank0
from horovod.control.meeting_on_hosts import PlaceOnHosts
from horovod.control.mesh import Endpoint
from horovod.control.munge import MungeError
from horovod.control.reachability import Findings, usable
from horovod.control.rendezvous_point import RendezvousPoint, exchange, point_on_this_host
from horovod.control.secret import decode_secret, secret_of_text
from horovod.core.config import (
    ELASTIC_ROUND,
    NETWORK_INTERFACE,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
    SECRET_KEY,
    USER_SECRET,
)
from horovod.core.coordination.agreement import list_ranks
from horovod.core.execution.cpu_affinity import CpuResources
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.world import FAILED, World
from horovod.environments import HostList, Identity, host_list
from horovod.environments.mpich import MPICH
from horovod.environments.open_mpi import OpenMPI
from horovod.environments.pals import PALS
from horovod.environments.slurm_address import address_of

Place = RendezvousPoint | PlaceOnHosts | PlaceAtRank0


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
    node: str = ""
    """What its launcher counts as one host, where local and cross numbers are still to be found out."""


_MPI_LAUNCHERS = frozenset({OpenMPI.name, MPICH.name, PALS.name})
"""Those whose ranks can reach one another through MPI, or through what MPI itself is started by."""

_decode = msgspec.msgpack.Decoder(RankInfo).decode
_decode_findings = msgspec.msgpack.Decoder(Findings).decode
# Made on import: where several threads make the first decoder of a type at the same time, msgspec 0.22 was seen to crash.


def exchange_rank_infos(
    own: RankInfo, world: World, place: Place | None, attempt: int, seconds: float
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
    elif isinstance(place, PlaceOnHosts | PlaceAtRank0):
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


def rendezvous_point(launched: Identity, env: Mapping[str, str] | None = None) -> Place | None:
    """Where the ranks of the launched job can meet; None where MPI's launcher passes on what they tell one another.

    Raises:
        ValueError: the launcher said neither a place nor enough to find one.
    """
    variables = os.environ if env is None else env
    address, port = variables.get(RENDEZVOUS_ADDRESS, ""), _port(variables)
    round_number = int(variables.get(ELASTIC_ROUND) or 0)
    if address and port and variables.get(SECRET_KEY):
        return RendezvousPoint((address, port), decode_secret(variables[SECRET_KEY]), hosted=False, round=round_number)
    if launched.local_size == launched.size and launched.job:
        return point_on_this_host(launched.job)
    if not (address and port):
        listed = host_list(variables)
        if listed is not None:
            return _place_on_hosts(launched, listed, _secret_of_environment(variables))
        if launched.launcher in _MPI_LAUNCHERS and (
            meeting_over_pmi.DESCRIPTOR in variables or rendezvous_over_mpi.obtainable()
        ):
            return None
    directory = _directory(launched, address, port, variables.get(NETWORK_INTERFACE, ""))
    if directory is None:
        by_mpi = "install mpi4py for the Python of every rank (pip install mpi4py), start the job with horovodrun --mpi"
        otherwise = "start the job with horovodrun, or pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)"
        raise ValueError(
            f"{FAILED}: {launched.launcher} started {launched.size} ranks on several hosts and gave them no place to meet. To "
            f"have them meet, {by_mpi if launched.launcher in _MPI_LAUNCHERS else otherwise}; or set {RENDEZVOUS_ADDRESS} to "
            f"the host of rank 0, {RENDEZVOUS_PORT} to a port that is free there, and {USER_SECRET} to a secret, the same on "
            "all ranks."
        )
    return PlaceAtRank0(directory, _user_secret(variables, needed=bool(address)))


def _secret_of_environment(variables: Mapping[str, str]) -> bytes:
    key = variables.get(SECRET_KEY, "")
    return decode_secret(key) if key else _user_secret(variables, needed=False)


def _place_on_hosts(launched: Identity, listed: HostList, secret: bytes) -> PlaceOnHosts:
    try:
        return PlaceOnHosts(launched.job, listed.hosts, listed.of_rank_0, listed.ports, secret, address_of)
    except MungeError as error:
        raise ValueError(
            f"Horovod initialization failed: {launched.launcher} started {launched.size} ranks on several hosts, and they "
            f"cannot prove to one another that they are of one user: MUNGE cannot be used here, {error}. Give them a secret "
            f"before they are started: export {USER_SECRET}=$(openssl rand -hex 16). Or start the job with "
            "horovodrun."
        ) from None


def _directory(launched: Identity, address: str, port: int, interface: str) -> Directory | None:
    """How the others find rank 0; what the user has set comes before what the launcher has."""
    rank_0 = launched.rank_0
    if address and port:
        return KnownAddress(address, port, f"{RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT}")
    if rank_0 is None:
        return None
    if rank_0.store:
        from horovod.control.torchrun_store import TorchrunStore

        return TorchrunStore(rank_0.host, rank_0.port, rank_0.store, interface)
    if port:
        return KnownAddress(rank_0.host, port, f"MASTER_ADDR, {RENDEZVOUS_PORT}")
    return KnownAddress(rank_0.host, rank_0.port, "MASTER_ADDR, MASTER_PORT")


def _port(variables: Mapping[str, str]) -> int:
    text = variables.get(RENDEZVOUS_PORT, "").strip()
    if text and (not text.isdecimal() or not 0 < int(text) < 65536):
        raise ValueError(f"environment variable {RENDEZVOUS_PORT}={text!r}: expected the number of a port")
    return int(text or 0)


def _user_secret(variables: Mapping[str, str], needed: bool) -> bytes:
    """What the user has given the ranks to know one another by; b"" if nothing.

    Where a foreign launcher says where ranks meet, a secret is the user's choice: these launchers trust their network. Who
    sets our own variables can set this one, too.
    """
    text = variables.get(USER_SECRET, "").strip()
    if not text and needed:
        raise ValueError(
            f"{FAILED}: {RENDEZVOUS_ADDRESS} is set, but neither {SECRET_KEY}, which a launcher of Horovod sets, nor "
            f"{USER_SECRET} is, so ranks cannot prove who they are. Set {USER_SECRET} to the same secret on all ranks: any "
            "text that nobody can guess, as `openssl rand -hex 16` prints it."
        )
    try:
        return secret_of_text(text) if text else b""
    except ValueError as error:
        raise ValueError(f"environment variable {USER_SECRET}: {error}") from None


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
