"""The rendezvous of ranks on several hosts whose launcher runs no server for them: rank 0 runs one, by TCP, in ``init()``.

The other ranks learn the server's address from a :class:`Directory`: from their launcher's variables (:class:`KnownAddress`),
or from the store that torchrun runs (``control/rendezvous/torchrun_store.py``).

With a secret that the user has given all ranks, no other process can take part. Without one the network is trusted as
``torch.distributed`` trusts it: a process that reaches rank 0 during the rendezvous, and speaks this protocol, can
pose as a rank. In both cases a client that sends anything else is disconnected, and the job is not disturbed.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import msgspec

from horovod._base.config import RENDEZVOUS_PORT
from horovod.control.dial import Address, alternatives, anywhere, dial
from horovod.control.handshake import HandshakeError
from horovod.control.mesh import own_addresses
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import PURPOSE, RendezvousError, ServerGoneError
from horovod.control.rendezvous.rendezvous_kinds import AllGather, Rendezvous, served_by_a_rank
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import LENGTH, make_secret

_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 3.0
"""How long rank 0 looks for a server of the launcher. Where none listens, the kernel of that host says so at once."""


class ServerEntry(msgspec.Struct, array_like=True, frozen=True):
    """The addresses at which rank 0 serves a rendezvous."""

    addresses: list[tuple[str, int]]
    key: bytes
    """The key that the handshake uses in addition to the user's secret; empty for an address from the launcher's variables."""


class Directory(ABC):
    """How the other ranks learn where rank 0 serves their rendezvous.

    Attributes:
        port: the port at which rank 0 listens; 0 lets the kernel choose.
        address_text: rank 0's address, as errors show it.
        entry_timeout: for how many seconds a rank tries an entry before it looks again.
    """

    port: int
    address_text: str
    entry_timeout: float

    @abstractmethod
    def publish(self, port: int, key: bytes) -> None:
        """Make the server's ``port`` and ``key`` known to the other ranks. Rank 0 calls this once its server listens, at all
        addresses of its host."""

    @abstractmethod
    def close(self) -> None:
        """Take back what this rank has published. Every rank calls this when its rendezvous is over. Never raises."""

    @abstractmethod
    def look_up(self, deadline: float) -> ServerEntry | None:
        """Where rank 0 serves the rendezvous; None if that is not known by ``deadline`` (``time.monotonic``). The other ranks
        call this.

        Raises:
            RendezvousError: it cannot become known; the message says why.
        """


class KnownAddress(Directory):
    """The launcher's variables say where rank 0 is, and at which port the other ranks expect it.

    Args:
        host, port: as the variables have them; the host may be a name that does not resolve yet.
        source: the variables' names, for errors.
    """

    def __init__(self, host: str, port: int, source: str) -> None:
        self.port = port
        self.address_text = f"{host}:{port} ({source})"
        self.entry_timeout = float("inf")
        self._entry = ServerEntry([(host, port)], b"")

    def publish(self, port: int, key: bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def look_up(self, deadline: float) -> ServerEntry | None:
        return self._entry


def handshake_secret(user_secret: bytes, key: bytes = b"") -> bytes:
    """The secret of handshakes with the server.

    Args:
        user_secret: the secret that the user has given all ranks; empty if none.
        key: that of the :class:`ServerEntry`.
    """
    return hmac.digest(user_secret, b"rendezvous" + key, hashlib.sha256)


class RendezvousAtRank0(Rendezvous):
    """A rendezvous that rank 0 of the launched job serves during ``init()``.

    Args:
        directory: how the other ranks find the server.
        user_secret: the secret that the user has given all ranks; empty if none.
        may_be_served: whether the launcher may run a server with this secret at that address. Then rank 0 looks first.

    Attributes:
        secret: the job's secret, after a session.
        address: where the other ranks look for the server, as text for messages.
    """

    makes_secret: ClassVar[bool] = True

    def __init__(self, directory: Directory, user_secret: bytes, may_be_served: bool = False) -> None:
        self._directory = directory
        self._may_be_served = may_be_served
        self._user_secret = user_secret
        self.secret = user_secret
        self.address: Address = directory.address_text

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        """As :meth:`Rendezvous.session`. ``calls`` is ignored: a restarted process counts from 1 again, others do not.

        Raises:
            RendezvousError: also if rank 0 of the launched job is not in ``members``: then no member runs a server.
        """
        if members and 0 not in members:
            raise RendezvousError(
                f"hvd.init(comm={list(members)}) needs rank 0 of the launched job, which is not in that list: under this "
                f"launcher rank 0 runs the rendezvous server, at {self._directory.address_text}. Start the job with "
                "horovodrun, or with torchrun, where any ranks can form a job"
            )
        directory = self._directory
        deadline = time.monotonic() + seconds
        server = members.index(0) if members else 0
        key = b"" if directory.port else make_secret()
        port, reason = 0, "it has not published its address"
        if rank == server and self._may_be_served and self._is_served(min(deadline, time.monotonic() + _LOOK_SECONDS)):
            server = -1

        def publish(made: RendezvousServer) -> None:
            nonlocal port
            port = made.address[1]
            directory.publish(port, key)

        def enter(limit: float) -> RendezvousClient:
            nonlocal reason
            if rank == server:
                return RendezvousClient((_LOOPBACK, port), handshake_secret(self._user_secret, key), limit)
            entry = directory.look_up(deadline)
            if entry is None:
                raise ServerGoneError(reason)
            try:
                limit = min(limit, directory.entry_timeout)
                return RendezvousClient(list(entry.addresses), handshake_secret(self._user_secret, entry.key), limit)
            except ServerGoneError as error:
                reason = str(error)
                raise

        try:
            with served_by_a_rank(
                lambda: self._server(key, size),
                enter,
                rank,
                size,
                seconds,
                members,
                server,
                publish,
                directory.address_text,
                look_again=True,
            ) as all_gather:
                yield self._with_secret(all_gather, rank)
        finally:
            directory.close()

    def _is_served(self, deadline: float) -> bool:
        """Whether a server of this job listens at the address already."""
        entry = self._directory.look_up(deadline)
        if entry is None:
            return False
        secret = handshake_secret(self._user_secret, entry.key)
        for address in [each for one in entry.addresses for each in alternatives(one)]:
            try:
                dial(address, secret, PURPOSE, deadline).close()
                return True
            except (OSError, HandshakeError):  # nothing listens there, or a stranger
                pass
        return False

    def _with_secret(self, all_gather: AllGather, rank: int) -> AllGather:
        """If the user has given no secret, have the first all-gather send one to all ranks, in front of rank 0's value."""
        if self._user_secret:
            return all_gather
        first = True

        def with_secret(subject: str, value: bytes, seconds: float) -> list[bytes]:
            nonlocal first
            if not first:
                return all_gather(subject, value, seconds)
            first = False
            values = all_gather(subject, make_secret() + value if rank == 0 else value, seconds)
            self.secret = values[0][:LENGTH]
            return [values[0][LENGTH:], *values[1:]]

        return with_secret

    def _server(self, key: bytes, size: int) -> RendezvousServer:
        secret = handshake_secret(self._user_secret, key)
        try:
            return RendezvousServer(secret, anywhere(own_addresses()), self._directory.port, expected=size)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {self._directory.address_text}, where the other ranks look for it: {error.strerror}. "
                "If the script's own torch.distributed listens there, call hvd.init() before it, or set "
                f"{RENDEZVOUS_PORT} to another port, the same on all ranks"
            ) from None
