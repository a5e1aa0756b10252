"""Where ``init()`` exchanges address cards: at the launcher's server, or at one that rank 0 runs for the moment."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from horovod.control.dial import Address
from horovod.control.rendezvous import RendezvousError
from horovod.control.rendezvous_client import RendezvousClient
from horovod.control.rendezvous_server import RendezvousServer


class RendezvousPoint(NamedTuple):
    """How the ranks of a job find each other.

    Attributes:
        address: of the launcher's server, or the name of a Unix socket that rank 0 is to serve.
        secret: the job's secret; empty where the kernel's word on the other side's user stands in for it.
        hosted: whether rank 0 runs the server itself.
        round: of an elastic job; 0 for other jobs.
    """

    address: Address
    secret: bytes
    hosted: bool
    round: int = 0


def point_on_this_host(job: str) -> RendezvousPoint:
    """A meeting place for a job whose launcher gave none, all ranks being on this host and of one user.

    Args:
        job: what the launcher calls this job; nobody else on the host may use it at the same time.
    """
    digest = hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
    return RendezvousPoint(f"\0horovod-{digest}", b"", hosted=True)


def exchange(
    place: RendezvousPoint,
    attempt: int,
    rank: int,
    size: int,
    value: bytes,
    seconds: float,
    members: Sequence[int] = (),
    subject: str = "init",
) -> list[bytes]:
    """All-gather ``value`` over the ranks of the job; every rank must call it.

    Args:
        attempt: how often these ranks have met before; where rank 0 serves the place, all must say the same.
        members: the ranks' numbers in the launched job, where only some of those that were launched take part.
        subject: what is exchanged; all ranks must say the same.

    Raises:
        TimeoutError: somebody did not come within ``seconds``; the message names them.
        horovod.control.rendezvous.RendezvousError: nobody serves the place, or ranks contradict each other.
    """
    group = ",".join(map(str, members))
    key = f"{subject}/{group}"
    if not place.hosted:
        if place.round:
            key += f"/{place.round}"
        with RendezvousClient(place.address, place.secret, seconds) as client:
            return client.exchange(key, rank, size, value, seconds, members, place.round)
    address = f"{place.address}-{attempt}"
    if members:
        address += "-" + hashlib.sha256(group.encode()).hexdigest()[:32]
    return meet_at_first_rank(
        lambda: RendezvousServer(place.secret, name=address, same_user=True),
        lambda: RendezvousClient(address, place.secret, seconds, same_user=True),
        key, rank, size, value, seconds, members,
    )  # fmt: skip


def meet_at_first_rank(
    make_server: Callable[[], RendezvousServer],
    make_client: Callable[[], RendezvousClient],
    key: str,
    rank: int,
    size: int,
    value: bytes,
    seconds: float,
    members: Sequence[int],
) -> list[bytes]:
    """All-gather ``value`` at a server that rank 0 runs until all have left it; every rank must call it.

    Raises:
        TimeoutError, horovod.control.rendezvous.RendezvousError: as :func:`exchange`.
    """
    deadline = time.monotonic() + seconds
    server = None
    if rank == 0:
        server = make_server()
        server.start()
    try:
        with _client(make_client, seconds, members) as client:
            values = client.exchange(key, rank, size, value, max(0.1, deadline - time.monotonic()), members)
            if server is not None:
                server.wait_until_left(deadline)
            return values
    finally:
        if server is not None:
            server.stop()


def _client(make: Callable[[], RendezvousClient], seconds: float, members: Sequence[int]) -> RendezvousClient:
    try:
        return make()
    except RendezvousError as error:
        first, call = (members[0], f"hvd.init(comm={list(members)})") if members else (0, "hvd.init()")
        raise TimeoutError(
            f"rank {first} of this job did not call {call} within {seconds:.3g} seconds. Look at its output; if it only "
            f"needs more time to start, raise HOROVOD_START_TIMEOUT ({error})"
        ) from error
