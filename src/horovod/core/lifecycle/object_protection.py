"""Protects pickled objects on the data plane, whose connections between hosts carry no digests.

A pickle can make its reader run any code. So each pickle carries a digest under a key that only the ranks of this job can
derive, and is decoded only if the digest is right::

    pickle  number (8, big-endian)  digest (32)

The digest covers the rank that sends, the call for which it sends, and the number, too. Each rank numbers its objects, and a
rank takes each number of another one once: so an object of an earlier call cannot take the place of a later one.
"""

from __future__ import annotations

import hmac
import threading
from hashlib import blake2b

from horovod.core.errors import EngineFailureError

_NUMBER, _DIGEST = 8, 32
_WINDOW = 1024
"""How far behind the latest object of a rank an object of another call may come; threads may send at the same time."""


class _Taken:
    """The numbers of one sender that were taken."""

    def __init__(self) -> None:
        self._latest = -1
        self._numbers: set[int] = set()

    def take(self, number: int) -> bool:
        """Whether the number is new. A number that is too old to tell counts as taken."""
        if number in self._numbers or number <= self._latest - _WINDOW:
            return False
        self._numbers.add(number)
        if number > self._latest:
            self._latest = number
            self._numbers = {each for each in self._numbers if each > number - _WINDOW}
        return True


class ObjectProtection:
    """The protection of the objects of one generation. For any thread.

    Args:
        key: of this generation, the same on all ranks; empty if all ranks are on one host: then objects have no digests.
        rank: this rank.
    """

    def __init__(self, key: bytes, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._sent = 0
        self._taken: dict[int, _Taken] = {}
        self._lock = threading.Lock()

    def trailer(self, pickled: bytes | memoryview, call: str) -> bytes:
        """What to send behind a pickle.

        Args:
            call: what the object is sent for, the same on all ranks that take part.
        """
        if not self._key:
            return b""
        with self._lock:
            self._sent += 1
            number = self._sent.to_bytes(_NUMBER, "big")
        return number + self._digest(pickled, self._rank, call, number)

    def check(self, received: memoryview, sender: int, call: str) -> memoryview:
        """The pickle of a rank's object, once it is known to be what that rank has sent for this call.

        Raises:
            EngineFailureError: it is not.
        """
        if not self._key:
            return received
        end = len(received) - _NUMBER - _DIGEST
        if end >= 0:
            number = bytes(received[end : end + _NUMBER])
            expected = self._digest(received[:end], sender, call, number)
            if hmac.compare_digest(expected, received[end + _NUMBER :]):
                with self._lock:
                    if self._taken.setdefault(sender, _Taken()).take(int.from_bytes(number, "big")):
                        return received[:end]
        raise EngineFailureError(
            f"Horovod: the object of rank {sender} for {call} is not what that rank sent: it was changed or repeated on its "
            f"way to rank {self._rank}. It was not decoded. Something between the hosts of these ranks alters what passes",
            ranks=[sender],
        )

    def _digest(self, pickled: bytes | memoryview, sender: int, call: str, number: bytes) -> bytes:
        hashed = blake2b(repr((sender, call, number)).encode(), key=self._key, digest_size=_DIGEST)
        hashed.update(b"\0")
        hashed.update(pickled)
        return hashed.digest()
