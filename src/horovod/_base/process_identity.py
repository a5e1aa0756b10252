"""The ranks and the host of a process, in one form for all launchers, and the hosts of a job.

:mod:`horovod.environments` reads them from the launcher's variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rank0:
    """How ranks on several hosts find rank 0."""

    host: str
    port: int
    store: str = ""
    """torchrun's name for the job if torchrun's store listens there; "" if rank 0 itself must listen."""


class HostList(NamedTuple):
    """The hosts of a job whose launcher runs no rendezvous server; rank 0, or the first rank of a part of the job, runs one."""

    hosts: tuple[str, ...]
    """Names as the launcher knows them."""
    of_rank_0: str
    """The host of rank 0; "" if the launcher does not tell."""
    ports: tuple[int, ...]
    """The ports that the launcher has reserved for the job; empty if it reserves none."""


@dataclass(frozen=True)
class ProcessIdentity:
    """The ranks of this process in its job, and its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str
    """The host name the launcher gave this rank, else the machine's."""
    launcher: str
    job: str
    """A name that no other job on this host, and no other start of this job, has; "" if the ranks do not need it."""
    local_ranks_known: bool = True
    """Whether the local and cross numbers are known. If not, the rendezvous finds them from the ranks' hosts."""
    node: str = ""
    """The launcher's name of a node, if a machine may have several nodes; "" for the host name."""
    rank_0: Rank0 | None = None
    """How the other ranks find rank 0, if the launcher tells it and runs no rendezvous server."""
    hosts: HostList | None = None
    """The hosts of a job on several hosts, if the launcher tells them."""
    over_mpi: bool = False
    """Whether the ranks can exchange data through MPI, or through MPI's process manager."""
