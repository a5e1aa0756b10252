"""Where ranks on several hosts meet when their launcher runs no server for them: rank 0 runs one, by TCP, during ``init()``.

The others learn its address from a :class:`Directory`: from their launcher's variables (:class:`KnownAddress`), or from the
store that torchrun runs (``control/torchrun_store.py``).

With a secret that the user has given all ranks, nobody else can take part. Without one the network is trusted as
``torch.distributed`` trusts it: whoever reaches rank 0 while the ranks meet, and speaks this protocol, can take a rank's
place. In both cases whoever sends anything else is disconnected, and the job is not disturbed.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from horovod.control.dial import Address
from horovod.control.rendezvous import RendezvousError, ServerGoneError
from horovod.control.rendezvous_client import RendezvousClient
from horovod.control.rendezvous_server import RendezvousServer
from horovod.control.secret import LENGTH, make_secret

_LOOPBACK = "127.0.0.1"
_LOOK_AGAIN_SECONDS = 0.1
"""Between two looks at a directory whose entry led nowhere."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """Where rank 0 serves a meeting."""

    addresses: list[tuple[str, int]]
    key: bytes
    """What proves at its door that one has read this; empty where nothing has to be read."""


class Directory(ABC):
    """How the other ranks learn where rank 0 serves their meeting.

    Attributes:
        port: at which rank 0 is to listen; 0 lets the kernel choose.
        place: what rank 0's place is called in errors.
        patience: seconds for which an entry is tried before it is looked up again.
    """

    port: int
    place: str
    stall_timeout: float

    @abstractmethod
    def publish(self, port: int, key: bytes) -> None:
        """Called by rank 0 when its server listens at ``port``, at all addresses of its host."""

    @abstractmethod
    def close(self) -> None:
        """Called by every rank when its meeting is over; takes back what it has published. Never raises."""

    @abstractmethod
    def look_up(self, deadline: float) -> Entry | None:
        """Called by the others: where rank 0 serves; None if that is not known by ``deadline`` (``time.monotonic``).

        Raises:
            RendezvousError: it can never be known; the message says why.
        """


class KnownAddress(Directory):
    """The launcher's variables say where rank 0 is, and at which port the others expect it.

    Args:
        host, port: as the variables have them; the host may be a name that is not known yet.
        source: the variables' names, for errors.
    """

    def __init__(self, host: str, port: int, source: str) -> None:
        self.port = port
        self.place = f"{host}:{port} ({source})"
        self.stall_timeout = float("inf")
        self._entry = Entry([(host, port)], b"")

    def publish(self, port: int, key: bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def look_up(self, deadline: float) -> Entry | None:
        return self._entry


class PlaceAtRank0:
    """A meeting place that rank 0 of the launched job serves for the moments of ``init()``.

    Args:
        directory: how the others find it.
        user_secret: what the user has given all ranks to know one another by; empty if nothing.

    Attributes:
        hosted: a rank runs the server.
        secret: of the job, once it has met.
        address: of the server as the other ranks look for it, for messages.
    """

    hosted = True

    def __init__(self, directory: Directory, user_secret: bytes) -> None:
        self._directory = directory
        self._user_secret = user_secret
        self.secret = user_secret
        self.address: Address = directory.place

    def exchange(
        self, attempt: int, rank: int, size: int, value: bytes, seconds: float, members: Sequence[int] = ()
    ) -> list[bytes]:
        """All-gather ``value``; as :func:`horovod.control.rendezvous_point.exchange`, which says what the arguments are.

        ``attempt`` is of no use here: a process that was restarted counts from 1 again, those that stayed do not.

        Raises:
            RendezvousError: also where rank 0 of the launched job is not among ``members``: nobody serves them.
        """
        if members and 0 not in members:
            raise RendezvousError(
                f"hvd.init(comm={list(members)}) needs rank 0 of the launched job, which is not in that list: under this "
                f"launcher the ranks meet at rank 0, at {self._directory.place}. Start the job with horovodrun, or with "
                "torchrun, where any ranks can meet"
            )
        key = f"init/{','.join(map(str, members))}"
        deadline = time.monotonic() + seconds
        if not self._user_secret and rank == 0:
            value = make_secret() + value
        serves = (members[rank] if members else rank) == 0
        meet = self._serve if serves else self._come
        try:
            values = meet(key, rank, size, value, deadline, members)
        finally:
            self._directory.close()
        if self._user_secret:
            return values
        self.secret = values[0][:LENGTH]
        return [values[0][LENGTH:], *values[1:]]

    def _serve(
        self, key: str, rank: int, size: int, value: bytes, deadline: float, members: Sequence[int]
    ) -> list[bytes]:
        directory = self._directory
        noted = b"" if directory.port else make_secret()
        try:
            server = RendezvousServer(self._door(noted), "0.0.0.0", directory.port)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at {directory.place}, where the other ranks look for it: {error.strerror}. If the "
                "script's own torch.distributed listens there, call hvd.init() before it, or set "
                "HOROVOD_GLOO_RENDEZVOUS_PORT to another port, the same on all ranks"
            ) from None
        server.start()
        try:
            port = server.address[1]
            directory.publish(port, noted)
            with RendezvousClient((_LOOPBACK, port), self._door(noted), _left(deadline)) as client:
                values = client.exchange(key, rank, size, value, _left(deadline), members)
                server.wait_until_left(deadline)
                return values
        finally:
            server.stop()

    def _come(
        self, key: str, rank: int, size: int, value: bytes, deadline: float, members: Sequence[int]
    ) -> list[bytes]:
        """The first entry may be of a rank 0 that has been restarted since, or is just about to end an earlier meeting."""
        directory = self._directory
        reason = "it has not said where it listens"
        while time.monotonic() < deadline:
            entry = directory.look_up(deadline)
            if entry is None:
                break
            try:
                stall_timeout = min(_left(deadline), directory.stall_timeout)
                with RendezvousClient(list(entry.addresses), self._door(entry.key), stall_timeout) as client:
                    return client.exchange(key, rank, size, value, _left(deadline), members)
            except ServerGoneError as error:
                reason = str(error)
                time.sleep(min(_LOOK_AGAIN_SECONDS, _left(deadline)))
        call = f"hvd.init(comm={list(members)})" if members else "hvd.init()"
        raise TimeoutError(
            f"rank 0 of this job, at {directory.place}, could not be met in {call}. Look at its output; if "
            f"it only needs more time to start, raise HOROVOD_START_TIMEOUT ({reason})"
        )

    def _door(self, noted: bytes) -> bytes:
        """What the server's handshake asks for."""
        return hmac.digest(self._user_secret, b"meeting" + noted, hashlib.sha256)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
