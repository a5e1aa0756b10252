"""Protects the messages of a connection after its handshake: what arrives is what was sent, whole and in order.

Each direction has a key of its own. The sender keeps a keyed hash (BLAKE2b, RFC 7693) of everything that it has sent, and sends
its present digest behind each length and behind each message::

    length (4, big-endian)  digest (16)  message  digest (16)

The receiver hashes what arrives. So a message that was changed, repeated, dropped, reordered, inserted, or sent back to where
it came from has a wrong digest, and so has every later one. The length has a digest of its own, because the receiver waits for
as many bytes as it says. Messages are not encrypted.

Without a key there are no digests: ``length (4)  message``. That is for connections that cannot be reached from outside this
host, and for streams that another program protects, such as ssh.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

LENGTH_BYTES = 4
DIGEST_BYTES = 16
_SHARED_FROM = 1024
"""The size in bytes from which the hash of a message goes into the hashes of connections, in place of the message. Then a
message to many connections is hashed once. Shorter messages are cheaper to hash than to hash twice."""


class SealError(ConnectionError):
    """A message is not what was sent: the connection must be closed."""


class Message:
    """A message that can be sent on several connections: they share its bytes, and its hash.

    Attributes:
        body: the bytes.
        hashed: what represents them in the hash of a connection.
    """

    __slots__ = ("body", "hashed")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.hashed = _hashed(body)


def _hashed(body: bytes) -> bytes:
    return body if len(body) < _SHARED_FROM else blake2b(body, digest_size=32).digest()


class Sealer:
    """The sending side of one direction.

    Args:
        key: of this direction; empty: send without digests.
    """

    __slots__ = ("_hash",)

    def __init__(self, key: bytes = b"") -> None:
        self._hash = blake2b(key=key, digest_size=DIGEST_BYTES) if key else None

    def seal(self, message: Message) -> list[bytes]:
        """The bytes to send for the next message, in one piece if it is short. A long message is one of the pieces as it is."""
        body, running = message.body, self._hash
        head, tail = len(body).to_bytes(LENGTH_BYTES, "big"), b""
        if running is not None:
            running.update(head)
            head += running.digest()
            running.update(message.hashed)
            tail = running.digest()
        return [head + body + tail] if len(body) < _SHARED_FROM else [head, body, tail]


class Opener:
    """The receiving side of one direction.

    Args:
        key: of this direction; empty: there are no digests.

    Attributes:
        head_bytes, tail_bytes: how many bytes come before and after each message.
    """

    __slots__ = ("_hash", "head_bytes", "tail_bytes")

    def __init__(self, key: bytes = b"") -> None:
        self._hash = blake2b(key=key, digest_size=DIGEST_BYTES) if key else None
        self.tail_bytes = DIGEST_BYTES if key else 0
        self.head_bytes = LENGTH_BYTES + self.tail_bytes

    def length(self, head: bytes | bytearray) -> int:
        """The length of the message that follows. To be called once for each head.

        Raises:
            SealError: it is not what was sent.
        """
        length = head[:LENGTH_BYTES]
        if self._hash is not None:
            self._hash.update(length)
            self._compare(head[LENGTH_BYTES:])
        return int.from_bytes(length, "big")

    def check(self, body: bytes, tail: bytes | bytearray) -> None:
        """Check the message that followed.

        Raises:
            SealError: it is not what was sent.
        """
        if self._hash is not None:
            self._hash.update(_hashed(body))
            self._compare(tail)

    def _compare(self, digest: bytes | bytearray) -> None:
        assert self._hash is not None
        if not hmac.compare_digest(digest, self._hash.digest()):
            raise SealError(
                "what arrives is not what was sent: a message was changed, repeated, dropped, reordered or inserted on its way"
            )
