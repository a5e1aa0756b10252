"""The rendezvous of ranks on several hosts whose launcher runs no server for them: rank 0 runs one, by TCP.

The other ranks know the hosts, and try ports that are derived from the job's name, or that the launcher has reserved. A secret
proves that both sides belong to the job:

- the user's secret, if all ranks have one in their environment, or else
- a new secret, which the server sends to every client, sealed by MUNGE for the processes of its own user::

    server -> client   "HVDS"  length (2, big-endian)  credential of: secret (32)  SHA-256 of the rendezvous's name (32)

  Another user can neither open the credential nor make one in this user's name. A recorded credential is of no use: the secret
  in it is unknown to the process that recorded it, and the handshake that follows needs the secret.

So the ranks of a job share a secret that was never sent in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from horovod.control.connection import receive_exactly
from horovod.control.dial import Address, anywhere
from horovod.control.handshake import HandshakeError
from horovod.control.mesh import own_addresses
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.munge import Munge, MungeError
from horovod.control.rendezvous.rendezvous_kinds import AllGather, Rendezvous, served_by_a_rank
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import LENGTH, make_secret

PORTS = range(61000, 65536)
"""Ports above those that Linux gives to outgoing connections (``ip_local_port_range``), so usually free."""
CANDIDATES = 4
"""How many ports a rendezvous may try: the first may be in use."""
_MAGIC = b"HVDS"
_LONGEST_CREDENTIAL = 4096
_LOOPBACK = "127.0.0.1"


class RendezvousOnHosts(Rendezvous):
    """A rendezvous for a job on several hosts.

    Args:
        job: what the launcher calls this job; no other job of this user has the same name at the same time.
        hosts: the hosts on which the launcher has started ranks.
        first: the host of rank 0; "" if that is not known.
        ports: the ports reserved for the job; empty if there are none.
        key: the user's secret, the same on all ranks; empty to have MUNGE prove the user instead.
        resolve: turns the launcher's name of a host into an address.

    Attributes:
        address: the first address at which the ranks of the whole job look for the server, for messages.
        secret: the job's secret, after a session; a new one at every rendezvous.

    Raises:
        MungeError: there is neither a key nor MUNGE.
    """

    makes_secret: ClassVar[bool] = True

    def __init__(
        self,
        job: str,
        hosts: Sequence[str],
        first: str,
        ports: Sequence[int],
        key: bytes,
        resolve: Callable[[str], str],
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._first = first
        self._ports = ports
        self._key = key
        self._resolve = resolve
        self._munge = None if key else Munge()
        self.address: Address = first or hosts[0], (ports or candidates(f"{job}/1/"))[0]
        self.secret = b""

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        group = ",".join(map(str, members))
        name = f"{os.getuid()}\n{self._job}\n{calls}\n{group}"
        ports = self._ports or candidates(name)
        sealed = _Sealed(name, self._munge)
        if self._key:
            self.secret = hmac.digest(self._key, name.encode(), hashlib.sha256)
        else:
            self.secret = make_secret() if rank == 0 else b""

        def serve() -> RendezvousServer:
            preface = b"" if self._key else sealed.preface(self.secret)
            for port in ports:
                try:
                    return RendezvousServer(
                        self.secret, anywhere(own_addresses()), port, preface=preface, expected=size
                    )
                except OSError as error:
                    reason = error
            raise RendezvousError(
                f"rank 0 cannot serve the rendezvous at any of the ports {', '.join(map(str, ports))}: "
                f"{reason.strerror}"
            )

        def enter(limit: float) -> RendezvousClient:
            if rank == 0:
                hosts = [_LOOPBACK]
            else:  # the first rank of a part of the job may be on any host
                known = self._first and not (members and members[0])
                hosts = [self._resolve(host) for host in ([self._first] if known else self._hosts)]
            addresses: list[Address] = [(host, port) for port in ports for host in hosts]
            client = RendezvousClient(addresses, self.secret if self._key else sealed.read, limit)
            self.secret = self.secret or sealed.secret
            return client

        with served_by_a_rank(serve, enter, rank, size, seconds, members) as all_gather:
            yield all_gather


def candidates(name: str) -> list[int]:
    """The ports at which the server of the rendezvous ``name`` may listen, in the order to try: the same on all ranks."""
    digest = hashlib.sha256(name.encode()).digest()
    first, step = int.from_bytes(digest[:4], "big"), 1 + digest[4]
    return [PORTS[(first + step * turn) % len(PORTS)] for turn in range(CANDIDATES)]


class _Sealed:
    """Carries the secret of one rendezvous, sealed by MUNGE, from the rank that runs the server to the others.

    Attributes:
        secret: the server's secret, after :meth:`read`.
    """

    def __init__(self, name: str, munge: Munge | None) -> None:
        self._name = hashlib.sha256(name.encode()).digest()
        self._munge = munge
        self.secret = b""

    def preface(self, secret: bytes) -> bytes:
        """The preface that the server sends to every client."""
        assert self._munge is not None
        try:
            credential = self._munge.seal(secret + self._name)
        except MungeError as error:
            raise RendezvousError(
                f"the ranks cannot prove to one another that they run as one user. MUNGE says: {error}"
            ) from None
        return _MAGIC + len(credential).to_bytes(2, "big") + credential

    def read(self, connection: socket.socket, deadline: float) -> bytes:
        """The secret from a new connection's preface."""
        assert self._munge is not None
        head = receive_exactly(connection, len(_MAGIC) + 2, deadline)
        length = int.from_bytes(head[len(_MAGIC) :], "big")
        if not head.startswith(_MAGIC) or length > _LONGEST_CREDENTIAL:
            raise HandshakeError("the process that listens there is not a rendezvous server that uses MUNGE")
        try:
            payload = self._munge.open(receive_exactly(connection, length, deadline))
        except MungeError as error:
            raise HandshakeError(f"MUNGE refuses what the server there sent: {error}") from None
        if payload[LENGTH:] != self._name:
            raise HandshakeError("the process that listens there is the rendezvous server of another job of this user")
        self.secret = payload[:LENGTH]
        return self.secret
