"""How the ranks of a job find each other: the interface, the launcher's server, and one that rank 0 runs in ``init()``."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from horovod._base.abstract_names import drawn, listed
from horovod._base.config import START_TIMEOUT
from horovod.control.dial import Address
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError, ServerGoneError
from horovod.control.rendezvous.server import RendezvousServer

_LOOK_AGAIN_SECONDS = 0.1
"""Seconds between attempts to reach a server that was gone."""

AllGather = Callable[[str, bytes, float], list[bytes]]
"""``all_gather(subject, value, seconds)``: every rank passes a value for the same subject, and gets the values of all, by rank.

Raises TimeoutError if ranks are missing after ``seconds``, and
:class:`~horovod.control.rendezvous.messages.RendezvousError`; the messages say why.
"""


class Rendezvous(ABC):
    """How the ranks of a job find each other.

    Attributes:
        secret: the job's secret, after a session; empty if rank 0 must send one to the others in the first all-gather.
        makes_secret: whether every rank has ``secret`` after a session although the launcher gave none.
    """

    secret: bytes
    makes_secret: ClassVar[bool] = False

    @abstractmethod
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> AbstractContextManager[AllGather]:
        """A context in which the ranks of the job can exchange data; every rank must enter it.

        Args:
            calls: how often ``init()`` was called with these ranks. If rank 0 runs the server, it must be the same on all
                ranks.
            rank, size: this rank's number among the ranks that take part, and how many take part.
            seconds: the time after which the ranks give up.
            members: the ranks' numbers in the launched job, if only some of the launched ranks take part.

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
    """The round of an elastic job; 0 for other jobs."""

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
        name: what the abstract name of the Unix socket begins with; more is added for every session, and its end is drawn.
    """

    name: str
    secret: bytes = b""

    @classmethod
    def of_job(cls, job: str) -> OnThisHost:
        """The rendezvous of a job with this name, which no other job on this host has at the same time."""
        digest = hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
        return cls(f"horovod-{digest}")

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        name = f"{self.name}-{calls}"
        if members:
            name += "-" + hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:32]

        def find() -> list[Address]:
            return [*listed(name)]

        with served_by_a_rank(
            lambda: RendezvousServer(b"", name=drawn(name), expected=size),
            lambda limit: RendezvousClient(find, b"", limit),
            rank,
            size,
            seconds,
            members,
        ) as all_gather:
            yield all_gather


class WithoutServer(Rendezvous):
    """All-gathers through the ranks' process manager, or through a library that connects them."""

    def __init__(self) -> None:
        self.secret = b""

    @abstractmethod
    def gather(self, rank: int, size: int, value: bytes, seconds: float) -> list[bytes]:
        """All-gather ``value``; every rank must call it. Returns the values by rank.

        Raises:
            TimeoutError: not all ranks have called it within ``seconds``.
        """

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        yield lambda subject, value, seconds: self.gather(rank, size, value, seconds)


def not_all_came(ranks: str, call: str, seconds: float) -> TimeoutError:
    """The error if not all of ``ranks`` made ``call`` in time, and it is not known which did not."""
    return TimeoutError(
        f"not all {ranks} called {call} within {seconds:.3g} seconds. Look at their output; if they only need more time to "
        f"start, raise {START_TIMEOUT}"
    )


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
def served_by_a_rank(
    make_server: Callable[[], RendezvousServer],
    enter: Callable[[float], RendezvousClient],
    rank: int,
    size: int,
    seconds: float,
    members: Sequence[int],
    server: int = 0,
    publish: Callable[[RendezvousServer], None] = lambda _: None,
    address_text: str = "",
    look_again: bool = False,
) -> Iterator[AllGather]:
    """All-gathers through a server that one rank runs until all have left it; every rank must enter it.

    Args:
        server: the rank that runs the server.
        make_server: called on that rank; the server is started here.
        enter: connects to the server within the given number of seconds; called in the first all-gather.
        publish: called on that rank when the server has started.
        address_text: where the other ranks look for the server, for an error; "" to say nothing.
        look_again: a server counts as found only once it has answered. A server that ends before that may belong to a process
            that was restarted, or to an earlier rendezvous, so the rank looks again.

    Raises:
        TimeoutError, horovod.control.rendezvous.messages.RendezvousError: as :meth:`Rendezvous.session`.
    """
    deadline = time.monotonic() + seconds
    found: AllGather | None = None
    with ExitStack() as stack:
        own = None
        if rank == server:
            own = make_server()
            own.start()
            stack.callback(own.stop)
            publish(own)

        def all_gather(subject: str, value: bytes, limit: float) -> list[bytes]:
            nonlocal found
            while found is None:
                entered = False
                try:
                    with ExitStack() as attempt:
                        client = attempt.enter_context(enter(_left(deadline)))
                        entered = True
                        by_server = all_gather_by(client, rank, size, members)
                        values = by_server(subject, value, min(limit, _left(deadline)))
                        stack.enter_context(attempt.pop_all())
                    found = by_server
                    return values
                except ServerGoneError as error:
                    if entered and not look_again:
                        raise
                    if time.monotonic() >= deadline - _LOOK_AGAIN_SECONDS:
                        raise _unreached(members, server, address_text, seconds, error) from error
                    time.sleep(_LOOK_AGAIN_SECONDS)
            return found(subject, value, limit)

        yield all_gather
        if own is not None:
            own.wait_until_left(deadline)


def _unreached(
    members: Sequence[int], server: int, address_text: str, seconds: float, error: RendezvousError
) -> TimeoutError:
    missing, call = (members[server], f"hvd.init(comm={list(members)})") if members else (server, "hvd.init()")
    at = f", at {address_text}," if address_text else ""
    return TimeoutError(
        f"rank {missing} of this job{at} did not call {call} within {seconds:.3g} seconds, or cannot be reached. Look at its "
        f"output; if it only needs more time to start, raise {START_TIMEOUT} ({error})"
    )


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
