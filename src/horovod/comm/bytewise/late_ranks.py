"""Finds the rank for which a collective waits, if the library that carries out the collective does not report it.

The ranks keep connections to each other. A rank that has waited for a while sends the number of its collective to all other
ranks, once. So each waiting rank knows which others wait, too, and a rank that has sent nothing is the late one. A closed
connection shows that the process of a rank has ended. Ranks do not answer, and send nothing while no rank is late.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping

_NOTE = struct.Struct("<Q")


class LateRanks:
    """Watches one rank's connections to the others.

    Args:
        sockets: a connection with every other rank, by index. This object owns them from now on.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._heard = dict.fromkeys(sockets, 0)
        self._rest = dict.fromkeys(sockets, b"")
        self._gone: set[int] = set()
        self._announced = 0
        for connection in self._sockets.values():
            connection.setblocking(False)

    def tell(self, number: int) -> None:
        """Tell all other ranks, once, that this rank waits in collective ``number``."""
        if number == self._announced:
            return
        self._announced = number
        for peer, connection in self._sockets.items():
            try:
                connection.send(_NOTE.pack(number))  # the kernel takes all eight bytes or none
            except BlockingIOError:
                pass
            except OSError:
                self._gone.add(peer)

    def gone(self, seconds: float = 0.0) -> list[int]:
        """The ranks whose processes have ended. Waits up to ``seconds`` for the first."""
        self._listen(seconds)
        return sorted(self._gone)

    def missing(self, number: int) -> int:
        """The rank for which collective ``number`` waits: one that is gone, else one that does not wait in it, else any."""
        gone = self.gone()
        return next(iter(gone + [peer for peer in self._sockets if self._heard[peer] < number] + list(self._sockets)))

    def _listen(self, seconds: float) -> None:
        """Wait up to ``seconds`` for data or a closed connection, and read what has arrived."""
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
        """Open file descriptors, which a forked child must close."""
        return [connection.fileno() for connection in self._sockets.values()]

    def close(self) -> None:
        """Close the connections. The other ranks see it at once."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)  # peers see this even if a forked child still holds a copy
            except OSError:
                pass  # the peer has closed the connection first
            connection.close()
