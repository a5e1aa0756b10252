"""The rendezvous of Gloo's ranks: a key-value store over connections that the ranks already have.

Gloo needs a store while it connects. PyTorch's store would open a port to which any process can connect. This store uses
authenticated connections, and ends when Gloo has connected.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch has it, and documents it

_LENGTH_BYTES = 4


class _Entry(msgspec.Struct, array_like=True):
    """One value of a peer. An empty key means that the peer sets no more values."""

    key: str
    value: bytes


_decode = msgspec.msgpack.Decoder(_Entry).decode


class ConnectionStore(Store):
    """A key-value store: every rank can get the values that any rank has set.

    Args:
        sockets: a connection with every other rank, for the store alone until :meth:`finish`.
        deadline: ``time.monotonic`` by which all values must have been set.

    Attributes:
        own: the values that this rank has set.
        others: the values of the other ranks that this rank has read.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], deadline: float) -> None:
        super().__init__()
        self._sockets = dict(sockets)
        self._unfinished = set(sockets)
        self._deadline = deadline
        self.own: dict[str, bytes] = {}
        self.others: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.own[key] = data
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.own[key] if key in self.own else self.others[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while missing := [key for key in keys if key not in self.own and key not in self.others]:
            if not self._unfinished:
                raise ConnectionError(f"no rank has set {missing[0]!r}")
            for peer in list(self._unfinished):
                self._hear(peer)

    def finish(self) -> None:
        """Return when every rank has called it. From then on no rank sets values, and the connections may be used otherwise."""
        self._tell("", b"")
        while self._unfinished:
            for peer in list(self._unfinished):
                self._hear(peer)

    def _tell(self, key: str, value: bytes) -> None:
        body = msgspec.msgpack.encode(_Entry(key, value))
        message = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        for peer, connection in self._sockets.items():
            connection.settimeout(max(0.001, self._deadline - time.monotonic()))
            try:
                connection.sendall(message)
            except ConnectionError as error:
                raise ConnectionError(f"rank {peer} of the group left while Gloo connected") from error

    def _hear(self, peer: int) -> None:
        """Read the next entry of a peer. All peers set the same number of entries in the same order."""
        length = int.from_bytes(self._receive(peer, _LENGTH_BYTES), "big")
        entry = _decode(self._receive(peer, length))
        if entry.key:
            self.others[entry.key] = entry.value
        else:
            self._unfinished.discard(peer)

    def _receive(self, peer: int, length: int) -> bytes:
        connection, data = self._sockets[peer], b""
        while len(data) < length:
            connection.settimeout(max(0.001, self._deadline - time.monotonic()))
            part = connection.recv(length - len(data))
            if not part:
                raise ConnectionError(f"rank {peer} of the group left while Gloo connected")
            data += part
        return data
