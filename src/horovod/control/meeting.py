"""Where ``init()`` exchanges address cards: at the launcher's server, or at one that rank 0 runs for the moment."""

from __future__ import annotations

import hashlib
import os
import time
from typing import NamedTuple

from horovod.control.dial import Address
from horovod.control.rendezvous import RendezvousClient, RendezvousError, RendezvousServer


class MeetingPlace(NamedTuple):
    """How the ranks of a job find each other.

    Attributes:
        address: of the launcher's server, or the name of a Unix socket that rank 0 is to serve.
        secret: the job's secret; empty where the kernel's word on the other side's user stands in for it.
        hosted: whether rank 0 runs the server itself.
    """

    address: Address
    secret: bytes
    hosted: bool


def place_on_this_host(job: str) -> MeetingPlace:
    """A meeting place for a job whose launcher gave none, all ranks being on this host and of one user.

    Args:
        job: what the launcher calls this job; nobody else on the host may use it at the same time.
    """
    digest = hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
    return MeetingPlace(f"\0horovod-{digest}", b"", hosted=True)


def exchange(place: MeetingPlace, generation: int, rank: int, size: int, value: bytes, seconds: float) -> list[bytes]:
    """All-gather ``value`` over the ranks of the job; every rank must call it with the same ``generation``.

    Raises:
        TimeoutError: somebody did not come within ``seconds``; the message names them.
        horovod.control.rendezvous.RendezvousError: nobody serves the place, or ranks contradict each other.
    """
    key = f"init/{generation}"
    if not place.hosted:
        with RendezvousClient(place.address, place.secret, seconds) as client:
            return client.exchange(key, rank, size, value, seconds)
    deadline = time.monotonic() + seconds
    address = f"{place.address}-{generation}"
    server = None
    if rank == 0:
        server = RendezvousServer(place.secret, name=address, same_user=True)
        server.start()
    try:
        with _client(address, place.secret, seconds) as client:
            values = client.exchange(key, rank, size, value, max(0.1, deadline - time.monotonic()))
            if server is not None:
                server.wait_until_left(deadline)
            return values
    finally:
        if server is not None:
            server.stop()


def _client(address: str, secret: bytes, seconds: float) -> RendezvousClient:
    try:
        return RendezvousClient(address, secret, seconds, same_user=True)
    except RendezvousError as error:
        raise TimeoutError(
            f"rank 0 of this job did not call hvd.init() within {seconds:.3g} seconds. Look at its output; if it only needs "
            f"more time to start, raise HOROVOD_START_TIMEOUT ({error})"
        ) from error
