"""Finds the rendezvous server: that of the launcher, or one that rank 0 runs during ``init()``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from horovod.control.dial import Address
from horovod.control.rendezvous import RendezvousError
from horovod.control.rendezvous_client import RendezvousClient
from horovod.control.rendezvous_server import RendezvousServer


class RendezvousPoint(NamedTuple):
    """Where the ranks of a job find each other.

    Attributes:
        address: of the launcher's server, or the name of the Unix socket that rank 0 listens on.
        secret: the job's secret; empty where the kernel tells which user the peer is instead.
        hosted: rank 0 runs the server.
    """

    address: Address
    secret: bytes
    hosted: bool


def point_on_this_host(job: str) -> RendezvousPoint:
    """The rendezvous point of a job whose launcher gave none. All ranks are on this host and run as one user.

    Args:
        job: what the launcher calls this job; no other job on this host has that name at the same time.
    """
    digest = hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
    return RendezvousPoint(f"\0horovod-{digest}", b"", hosted=True)


def exchange(
    point: RendezvousPoint,
    calls: int,
    rank: int,
    size: int,
    value: bytes,
    seconds: float,
    members: Sequence[int] = (),
) -> list[bytes]:
    """All-gather ``value`` over the ranks of the job; every rank must call it.

    Args:
        calls: how often ``init()`` was called with these ranks. Where rank 0 runs the server, it must agree on all ranks.
        members: the ranks' numbers in the launched job, where only some of the launched ranks take part.

    Raises:
        TimeoutError: ranks are missing after ``seconds``; the message names them.
        horovod.control.rendezvous.RendezvousError: the server has ended, or ranks contradict each other.
    """
    group = ",".join(map(str, members))
    key = f"init/{group}"
    if not point.hosted:
        with RendezvousClient(point.address, point.secret, seconds) as client:
            return client.exchange(key, rank, size, value, seconds, members)
    deadline = time.monotonic() + seconds
    address = f"{point.address}-{calls}"
    if members:
        address += "-" + hashlib.sha256(group.encode()).hexdigest()[:32]
    server = None
    if rank == 0:
        server = RendezvousServer(point.secret, name=address, same_user=True)
        server.start()
    try:
        with _client(address, point.secret, seconds, members) as client:
            values = client.exchange(key, rank, size, value, max(0.1, deadline - time.monotonic()), members)
            if server is not None:
                server.wait_until_left(deadline)
            return values
    finally:
        if server is not None:
            server.stop()


def _client(address: str, secret: bytes, seconds: float, members: Sequence[int]) -> RendezvousClient:
    try:
        return RendezvousClient(address, secret, seconds, same_user=True)
    except RendezvousError as error:
        first, call = (members[0], f"hvd.init(comm={list(members)})") if members else (0, "hvd.init()")
        raise TimeoutError(
            f"rank {first} of this job did not call {call} within {seconds:.3g} seconds. Look at its output; if it only "
            f"needs more time to start, raise HOROVOD_START_TIMEOUT ({error})"
        ) from error
