"""Which rank a collective waits for, where the library that carries it out cannot tell.

The ranks keep a connection with one another. A rank that has waited for a while writes to all of them which collective
it waits in, once. So those who have waited as long know each other, and whoever has not written is the one that does
not come. A rank whose process has ended is known by its closed connection. Nobody has to answer, and while all is well
nothing is sent.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping

_NOTE = struct.Struct("<Q")


class LateRanks:
    """One rank's connections with the others, by rank. Owned from now on."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._heard = dict.fromkeys(sockets, 0)
        self._rest = dict.fromkeys(sockets, b"")
        self._gone: set[int] = set()
        self._told = 0
        for connection in self._sockets.values():
            connection.setblocking(False)

    def tell(self, number: int) -> None:
        """Let everybody know that this rank waits in collective ``number``."""
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
        """The ranks whose processes have ended, after waiting so long at most for the first to show."""
        self._listen(seconds)
        return sorted(self._gone)

    def missing(self, number: int) -> int:
        """A rank that collective ``number`` waits for: one that is gone, else one that has not come, else any."""
        gone = self.gone()
        return next(iter(gone + [peer for peer in self._sockets if self._heard[peer] < number] + list(self._sockets)))

    def _listen(self, seconds: float) -> None:
        """Take note of everything that has come."""
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
        """What a forked child must close."""
        return [connection.fileno() for connection in self._sockets.values()]

    def close(self) -> None:
        """Close the connections, which the others see."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)  # also where a forked child still holds a copy
            except OSError:
                pass  # the peer was faster
            connection.close()
