"""Mutual authentication of a new connection, without I/O: bytes in, bytes out.

Both sides know the job's secret, and neither sends it. No byte of a peer is decoded before the peer has proved that it knows
the secret. Nonces make every handshake unique, so a recorded one cannot be replayed::

    server -> client   "HVD2"  server nonce (32)
    client -> server   client nonce (32)  length of purpose (2)  purpose  HMAC(secret, "client", nonces, purpose) (32)
    server -> client   HMAC(secret, "server", nonces, purpose) (32)

``purpose`` says what the connection is for: at most 1024 opaque bytes. HMAC is HMAC-SHA256 (RFC 2104).

Both sides then have the same two keys, one for each direction: HMAC(secret, "to server", nonces, purpose) and HMAC(secret,
"to client", nonces, purpose). They protect the messages of the connection (:mod:`horovod.control.sealing`).
The first bytes name the protocol and its version. A version is what both sides must have in common from here on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

_PROTOCOL, _VERSION = b"HVD", b"2"
MAGIC = _PROTOCOL + _VERSION
NONCE = 32
MAC = 32
LONGEST_PURPOSE = 1024
GREETING = len(MAGIC) + NONCE


class HandshakeError(Exception):
    """The peer does not belong to this job, or uses another protocol."""


class Keys(NamedTuple):
    """The keys of one end of a connection; both are empty on a connection whose messages need no protection."""

    sending: bytes = b""
    receiving: bytes = b""


class _Exchange(NamedTuple):
    """What both sides know after the exchange of nonces."""

    secret: bytes
    server_nonce: bytes
    client_nonce: bytes
    purpose: bytes

    def derive(self, label: bytes) -> bytes:
        """32 bytes that only processes with the secret can compute. No label begins with another one and a zero byte."""
        text = label + b"\0" + self.server_nonce + self.client_nonce + self.purpose
        return hmac.digest(self.secret, text, hashlib.sha256)


class ServerHandshake:
    """The accepting side. Send ``greeting``, and pass what arrives to :meth:`receive` until it returns the reply to send.

    Attributes:
        purpose: what the connection is for; set when :meth:`receive` has returned a reply.
        keys: the keys for the server's end; set at the same time.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self._received = bytearray()
        self.greeting = MAGIC + self._nonce
        self.purpose = b""
        self.keys = Keys()

    def receive(self, data: bytes) -> bytes | None:
        """Take bytes from the client. Returns the reply when the client has proved that it knows the secret; None until then.

        Raises:
            HandshakeError: the client does not know the secret, or uses another protocol.
        """
        self._received += data
        if len(self._received) < NONCE + 2:
            return None
        length = int.from_bytes(self._received[NONCE : NONCE + 2], "big")
        if length > LONGEST_PURPOSE:
            raise HandshakeError("the purpose is too long")
        end = NONCE + 2 + length + MAC
        if len(self._received) < end:
            return None
        client_nonce = bytes(self._received[:NONCE])
        purpose = bytes(self._received[NONCE + 2 : end - MAC])
        proof = bytes(self._received[end - MAC : end])
        exchange = _Exchange(self._secret, self._nonce, client_nonce, purpose)
        if not hmac.compare_digest(proof, exchange.derive(b"client")):
            raise HandshakeError("the client does not know the job's secret")
        if len(self._received) > end:
            raise HandshakeError("the client has not waited for the server's proof")
        self.purpose = purpose
        self.keys = Keys(sending=exchange.derive(b"to client"), receiving=exchange.derive(b"to server"))
        return exchange.derive(b"server")


class ClientHandshake:
    """The connecting side. Answer the server's greeting with :meth:`answer`, then check its proof with :meth:`finish`.

    Attributes:
        keys: the keys for the client's end; set when :meth:`finish` has returned.
    """

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        if len(purpose) > LONGEST_PURPOSE:
            raise ValueError(f"a purpose has at most {LONGEST_PURPOSE} bytes")
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE)
        self._exchange: _Exchange | None = None
        self.keys = Keys()

    def answer(self, greeting: bytes) -> bytes:
        """The answer to the server's greeting of :data:`GREETING` bytes.

        Raises:
            HandshakeError: the greeting is not that of a Horovod job, or that of a Horovod with another protocol.
        """
        if len(greeting) != GREETING or not greeting.startswith(_PROTOCOL):
            raise HandshakeError("the process that listens there is not part of a Horovod job")
        if not greeting.startswith(MAGIC):
            theirs, own = greeting[len(_PROTOCOL) : len(MAGIC)].decode(errors="replace"), _VERSION.decode()
            raise HandshakeError(
                f"the process that listens there uses version {theirs!r} of Horovod's protocol, and this one version {own!r}: "
                "install the same Horovod on all hosts"
            )
        self._exchange = _Exchange(self._secret, greeting[len(MAGIC) :], self._nonce, self._purpose)
        proof = self._exchange.derive(b"client")
        return self._nonce + len(self._purpose).to_bytes(2, "big") + self._purpose + proof

    def finish(self, proof: bytes) -> None:
        """Check the server's proof of :data:`MAC` bytes.

        Raises:
            HandshakeError: the server does not know the secret.
        """
        exchange = self._exchange
        if exchange is None or not hmac.compare_digest(proof, exchange.derive(b"server")):
            raise HandshakeError("the process that listens there does not know the job's secret")
        self.keys = Keys(sending=exchange.derive(b"to server"), receiving=exchange.derive(b"to client"))
