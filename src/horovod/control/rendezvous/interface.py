"""How the ranks of a job find each other: the interface, the launcher's server, and one that rank 0 runs in ``init()``."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from horovod.control.dial import Address
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.server import RendezvousServer
from horovod.core.config import START_TIMEOUT

AllGather = Callable[[str, bytes, float], list[bytes]]
"""``all_gather(subject, value, seconds)``: every rank gives a value for the same subject, and gets those of all, by rank.

Raises TimeoutError where ranks are missing, and :class:`~horovod.control.rendezvous.messages.RendezvousError`; the
messages say why.
"""


class Rendezvous(ABC):
    """How the ranks of a job find each other.

    Attributes:
        secret: the job's, after a session; empty where rank 0 has to send one to the others in the first all-gather.
        makes_secret: every rank has ``secret`` after a session, although the launcher gave none.
    """

    secret: bytes
    makes_secret: ClassVar[bool] = False

    @abstractmethod
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> AbstractContextManager[AllGather]:
        """Where the ranks of the job can exchange data; every rank must enter it.

        Args:
            calls: how often ``init()`` was called with these ranks. Where rank 0 runs the server, it must agree on all ranks.
            seconds: after which the ranks give up.
            members: the ranks' numbers in the launched job, where only some of the launched ranks take part.

        Raises:
            TimeoutError: ranks are missing after ``seconds``; the message names them.
            horovod.control.rendezvous.messages.RendezvousError: the server has ended, or ranks contradict each other.
        """

    def exchange(
        self, calls: int, rank: int, size: int, value: bytes, seconds: float, members: Sequence[int] = ()
    ) -> list[bytes]:
        """A session of one all-gather."""
        with self.session(calls, rank, size, seconds, members) as all_gather:
            return all_gather("init", value, seconds)


@dataclass(frozen=True)
class LauncherServer(Rendezvous):
    """The launcher's server, which runs as long as the job."""

    address: Address
    secret: bytes
    round: int = 0
    """Of an elastic job; 0 for other jobs."""

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        with RendezvousClient(self.address, self.secret, seconds) as client:
            yield all_gather_by(client, rank, size, members, self.round)


@dataclass(frozen=True)
class OnThisHost(Rendezvous):
    """A server that rank 0 runs, for a job whose ranks are all on this host and run as one user.

    Args:
        address: the abstract name of the Unix socket.
    """

    address: str
    secret: bytes = b""

    @classmethod
    def of_job(cls, job: str) -> OnThisHost:
        """For what the launcher calls this job; no other job on this host has that name at the same time."""
        digest = hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
        return cls(f"\0horovod-{digest}")

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        address = f"{self.address}-{calls}"
        if members:
            address += "-" + hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:32]
        with server_of_rank_0(
            lambda: RendezvousServer(b"", name=address, same_user=True),
            lambda: RendezvousClient(address, b"", seconds, same_user=True),
            rank,
            seconds,
            members,
        ) as client:
            yield all_gather_by(client, rank, size, members)


def all_gather_by(
    client: RendezvousClient, rank: int, size: int, members: Sequence[int], round_number: int = 0
) -> AllGather:
    """All-gathers through one connection to a server."""
    group = ",".join(map(str, members))

    def all_gather(subject: str, value: bytes, seconds: float) -> list[bytes]:
        key = f"{subject}/{group}" + (f"/{round_number}" if round_number else "")
        return client.exchange(key, rank, size, value, max(0.1, seconds), members, round_number)

    return all_gather


@contextmanager
def server_of_rank_0(
    make_server: Callable[[], RendezvousServer],
    make_client: Callable[[], RendezvousClient],
    rank: int,
    seconds: float,
    members: Sequence[int],
) -> Iterator[RendezvousClient]:
    """A client of a server that rank 0 runs until all have left it; every rank must enter it.

    Raises:
        TimeoutError, horovod.control.rendezvous.messages.RendezvousError: as :meth:`Rendezvous.session`.
    """
    deadline = time.monotonic() + seconds
    server = None
    if rank == 0:
        server = make_server()
        server.start()
    try:
        with _client(make_client, seconds, members) as client:
            yield client
            if server is not None:
                server.wait_until_left(deadline)
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
            f"needs more time to start, raise {START_TIMEOUT} ({error})"
        ) from error
