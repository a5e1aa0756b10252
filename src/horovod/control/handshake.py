"""Mutual authentication of a new connection, without I/O: bytes in, bytes out.

Both sides know the job's secret, and neither sends it. No byte of a peer is decoded before the peer has proved that it knows
the secret. Nonces make every handshake unique, so a recorded one cannot be replayed::

    server -> client   "HVD1"  server nonce (32)
    client -> server   client nonce (32)  length of purpose (2)  purpose  HMAC(secret, "client", nonces, purpose) (32)
    server -> client   HMAC(secret, "server", nonces, purpose) (32)

``purpose`` says what the connection is for: at most 1024 opaque bytes. HMAC is HMAC-SHA256 (RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

MAGIC = b"HVD1"
NONCE = 32
MAC = 32
LONGEST_PURPOSE = 1024
GREETING = len(MAGIC) + NONCE


class HandshakeError(Exception):
    """The peer does not belong to this job, or uses another protocol."""


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, role + server_nonce + client_nonce + purpose, hashlib.sha256)


class ServerHandshake:
    """The accepting side. Send ``greeting``, and pass what arrives to :meth:`receive` until it returns the reply to send.

    Attributes:
        purpose: what the connection is for; set when :meth:`receive` has returned a reply.
        rest: the bytes that followed the handshake.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self._received = bytearray()
        self.greeting = MAGIC + self._nonce
        self.purpose = b""
        self.rest = b""

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
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", self._nonce, client_nonce, purpose)):
            raise HandshakeError("the client does not know the job's secret")
        self.purpose = purpose
        self.rest = bytes(self._received[end:])
        return _proof(self._secret, b"server", self._nonce, client_nonce, purpose)


class ClientHandshake:
    """The connecting side. Answer the server's greeting with :meth:`answer`, then check its proof with :meth:`finish`."""

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        if len(purpose) > LONGEST_PURPOSE:
            raise ValueError(f"a purpose has at most {LONGEST_PURPOSE} bytes")
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE)
        self._expected = b""

    def answer(self, greeting: bytes) -> bytes:
        """The answer to the server's greeting of :data:`GREETING` bytes.

        Raises:
            HandshakeError: the greeting is not that of a Horovod job.
        """
        if len(greeting) != GREETING or not greeting.startswith(MAGIC):
            raise HandshakeError("the process that listens there is not part of a Horovod job")
        server_nonce = greeting[len(MAGIC) :]
        self._expected = _proof(self._secret, b"server", server_nonce, self._nonce, self._purpose)
        proof = _proof(self._secret, b"client", server_nonce, self._nonce, self._purpose)
        return self._nonce + len(self._purpose).to_bytes(2, "big") + self._purpose + proof

    def finish(self, proof: bytes) -> None:
        """Check the server's proof of :data:`MAC` bytes.

        Raises:
            HandshakeError: the server does not know the secret.
        """
        if not hmac.compare_digest(proof, self._expected):
            raise HandshakeError("the process that listens there does not know the job's secret")
