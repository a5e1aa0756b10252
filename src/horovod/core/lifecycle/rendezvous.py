"""Chooses the rendezvous: how the ranks of a job find each other in ``init()``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from horovod._base.config import (
    ELASTIC_ROUND,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
    SECRET_KEY,
    USER_SECRET,
    network_interfaces,
)
from horovod.comm.mpi import runtime as mpi
from horovod.control.rendezvous import over_mpi, over_pmi
from horovod.control.rendezvous.at_rank_0 import Directory, KnownAddress, RendezvousAtRank0
from horovod.control.rendezvous.munge import MungeError
from horovod.control.rendezvous.on_hosts import RendezvousOnHosts
from horovod.control.rendezvous.over_mpi import RendezvousOverMpi
from horovod.control.rendezvous.over_pmi import RendezvousOverPmi
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer, OnThisHost, Rendezvous
from horovod.control.secret import decode_secret, secret_of_user
from horovod.control.slurm_address import address_of
from horovod.core.lifecycle.world import FAILED, World

if TYPE_CHECKING:
    from horovod._base.process_identity import HostList, ProcessIdentity


def rendezvous_of(world: World, env: Mapping[str, str] | None = None) -> Rendezvous:
    """The rendezvous by which the ranks of the job find each other.

    Raises:
        ValueError: the launcher named no server, and gave too little information for another way.
    """
    if world.communicator is not None:
        return RendezvousOverMpi(lambda seconds: world.communicator)
    variables = os.environ if env is None else env
    launched = world.launched
    address, port = variables.get(RENDEZVOUS_ADDRESS, ""), _port(variables)
    round_number = int(variables.get(ELASTIC_ROUND) or 0)
    if address and port and variables.get(SECRET_KEY):
        return LauncherServer((address, port), decode_secret(variables[SECRET_KEY]), round_number)
    if launched.local_size == launched.size and launched.job:
        return OnThisHost.of_job(launched.job)
    if not (address and port):
        if launched.hosts is not None:
            return _on_hosts(launched, launched.hosts, _secret_of_environment(variables))
        found = _of_mpi(world, variables)
        if found is not None:
            return found
    directory = _directory(launched, address, port, network_interfaces(variables))
    if directory is None:
        by_mpi = "install mpi4py for the Python of every rank (pip install mpi4py), start the job with horovodrun --mpi"
        otherwise = "start the job with horovodrun, or pass an mpi4py communicator: hvd.init(comm=MPI.COMM_WORLD)"
        raise ValueError(
            f"{FAILED}: {launched.launcher} started {launched.size} ranks on several hosts and gave them no rendezvous server. "
            f"To have them find each other, {by_mpi if launched.over_mpi else otherwise}; or set {RENDEZVOUS_ADDRESS} to "
            f"the host of rank 0, {RENDEZVOUS_PORT} to a port that is free there, and {USER_SECRET} to a secret, the same on "
            "all ranks."
        )
    return RendezvousAtRank0(directory, user_secret(variables, needed=bool(address)), may_be_served=bool(address))


def _of_mpi(world: World, variables: Mapping[str, str]) -> Rendezvous | None:
    """A rendezvous through MPI's process manager (PMI) or through MPI; None if there is neither.

    MPI comes first if the script has initialized it, and last otherwise: starting it takes time.
    """
    launched = world.launched
    by_pmi = variables.get(over_pmi.DESCRIPTOR, "")
    if not launched.over_mpi or not (by_pmi or over_mpi.obtainable()):
        return None
    if world.listed:
        raise ValueError(
            f"{FAILED}: comm={list(world.listed)}: where {launched.launcher} starts ranks on several hosts, a list of ranks "
            "needs a rendezvous server. Pass a communicator, as in hvd.init(comm=MPI.COMM_WORLD.Split(color)), or start the "
            "job with horovodrun --mpi."
        )
    if by_pmi.isdecimal() and not over_mpi.is_running():
        return RendezvousOverPmi(int(by_pmi))

    def communicator(seconds: float) -> object:
        return over_mpi.world(
            launched.size, launched.launcher, lambda deadline: mpi.initialised_mpi(deadline=deadline), seconds
        )

    return RendezvousOverMpi(communicator, "hvd.init()")


def _secret_of_environment(variables: Mapping[str, str]) -> bytes:
    key = variables.get(SECRET_KEY, "")
    return decode_secret(key) if key else user_secret(variables, needed=False)


def _on_hosts(launched: ProcessIdentity, listed: HostList, secret: bytes) -> RendezvousOnHosts:
    try:
        return RendezvousOnHosts(launched.job, listed.hosts, listed.of_rank_0, listed.ports, secret, address_of)
    except MungeError as error:
        raise ValueError(
            f"{FAILED}: {launched.launcher} started {launched.size} ranks on several hosts, and they cannot prove to one "
            f"another that they are of one user: MUNGE cannot be used here, {error}. Give them a secret before they are "
            f"started: export {USER_SECRET}=$(openssl rand -hex 16). Or start the job with horovodrun."
        ) from None


def _directory(launched: ProcessIdentity, address: str, port: int, interfaces: str) -> Directory | None:
    """How the other ranks find rank 0. The user's setting comes before the launcher's."""
    rank_0 = launched.rank_0
    if address and port:
        return KnownAddress(address, port, f"{RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT}")
    if rank_0 is None:
        return None
    if rank_0.store:
        from horovod.control.rendezvous.torchrun_store import TorchrunStore

        return TorchrunStore(rank_0.host, rank_0.port, rank_0.store, interfaces)
    if port:
        return KnownAddress(rank_0.host, port, f"MASTER_ADDR, {RENDEZVOUS_PORT}")
    return KnownAddress(rank_0.host, rank_0.port, "MASTER_ADDR, MASTER_PORT")


def _port(variables: Mapping[str, str]) -> int:
    text = variables.get(RENDEZVOUS_PORT, "").strip()
    if text and (not text.isdecimal() or not 0 < int(text) < 65536):
        raise ValueError(f"environment variable {RENDEZVOUS_PORT}={text!r}: expected the number of a port")
    return int(text or 0)


def user_secret(variables: Mapping[str, str], needed: bool) -> bytes:
    """The secret that the user has given all ranks; b"" if none.

    If another launcher provides the rendezvous, a secret is optional: these launchers trust their network. A user who sets
    Horovod's own variables can set this one, too.
    """
    secret = secret_of_user(variables)
    if not secret and needed:
        raise ValueError(
            f"{FAILED}: {RENDEZVOUS_ADDRESS} is set, but neither {SECRET_KEY}, which a launcher of Horovod sets, nor "
            f"{USER_SECRET} is, so ranks cannot prove who they are. Set {USER_SECRET} to the same secret on all ranks: any "
            "text that cannot be guessed, as `openssl rand -hex 16` prints it."
        )
    return secret
