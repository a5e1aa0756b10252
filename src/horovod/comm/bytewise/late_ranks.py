"""Finds the rank that a collective waits for, if the library that carries it out cannot tell.

The ranks keep connections to each other. A rank that has waited for a while sends the number of its collective to all others,
once. So the waiting ranks know of each other, and a rank that has sent nothing is the late one. A rank whose process has ended
is known by its closed connection. No answers are needed, and nothing is sent while no rank is late.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping

_NOTE = struct.Struct("<Q")


class LateRanks:
    """Watches one rank's connections to the others, by rank, and owns them."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._heard = dict.fromkeys(sockets, 0)
        self._rest = dict.fromkeys(sockets, b"")
        self._gone: set[int] = set()
        self._told = 0
        for connection in self._sockets.values():
            connection.setblocking(False)

    def tell(self, number: int) -> None:
        """Tell all other ranks, once, that this rank waits in collective ``number``."""
        if number == self._told:
            return
        self._told = number
        for peer, connection in self._sockets.items():
            try:
                connection.send(_NOTE.pack(number))  # eight bytes, of which the kernel takes all or none
            except BlockingIOError:
                pass
            except OSError:
                self._gone.add(peer)

    def gone(self, seconds: float = 0.0) -> list[int]:
        """The ranks whose processes have ended. Waits up to ``seconds`` for the first."""
        self._listen(seconds)
        return sorted(self._gone)

    def missing(self, number: int) -> int:
        """The rank that collective ``number`` waits for: one that is gone, else one that is not waiting in it, else any."""
        gone = self.gone()
        return next(iter(gone + [peer for peer in self._sockets if self._heard[peer] < number] + list(self._sockets)))

    def _listen(self, seconds: float) -> None:
        """Read everything that has arrived."""
        poll = select.poll()
        by_descriptor = {self._sockets[peer].fileno(): peer for peer in self._sockets if peer not in self._gone}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(seconds * 1000):
            peer = by_descriptor[descriptor]
            try:
                data = self._sockets[peer].recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._gone.add(peer)
            data = self._rest[peer] + data
            whole = len(data) - len(data) % _NOTE.size
            self._rest[peer] = data[whole:]
            if whole:
                self._heard[peer] = max(number for (number,) in _NOTE.iter_unpack(data[:whole]))

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [connection.fileno() for connection in self._sockets.values()]

    def close(self) -> None:
        """Close the connections. The other ranks see it at once."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)  # also where a forked child still holds a copy
            except OSError:
                pass  # the peer was faster
            connection.close()
