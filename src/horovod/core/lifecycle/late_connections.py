"""Connections that members of a process set make while the job runs, at a collective that all of them carry out.

The listeners of ``init()`` are closed by then. So each member opens others, tells the others where, connects, and closes them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from horovod.control.connection import Connection
from horovod.control.mesh import ConnectionKey, Endpoint, Mesh, data_connections

_decode = msgspec.msgpack.Decoder(Endpoint).decode


@dataclass(frozen=True)
class ListenerSettings:
    """The parameters of connections that a rank makes after ``init()``.

    Attributes:
        size: the size of the job.
        open_mesh: opens listeners, at addresses that the other ranks can reach.
        generation: distinguishes the connections from those of other jobs.
        secret: the secret of the job.
        seconds: how long the others may take to connect.
    """

    size: int
    open_mesh: Callable[[], Mesh]
    generation: str
    secret: bytes
    seconds: float


class LateConnections:
    """The connections of one communicator: one to each other member for each network that the two hosts share.

    Args:
        ranks: the members' global ranks; ``rank`` is this one's.
        role, group: distinguish these connections from those of other communicators.
    """

    def __init__(
        self, listener_settings: ListenerSettings, ranks: Sequence[int], rank: int, role: str, group: int
    ) -> None:
        self._listener_settings = listener_settings
        self._ranks = list(ranks)
        self._rank = rank
        self._role = role
        self._group = group
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._cancelled = False

    def connect(self, gather: Callable[[bytes], Sequence[bytes]]) -> Mapping[int, Sequence[socket.socket]]:
        """Connect with all other members, which call it at the same collective. Returns, by member, a socket for each network.

        Args:
            gather: passes bytes to all members, and returns those of all by index.

        Raises:
            MeshError, OSError: connecting failed, or was cancelled.
        """
        listener_settings = self._listener_settings
        deadline = time.monotonic() + listener_settings.seconds
        mesh = listener_settings.open_mesh()
        with self._lock:
            self._mesh = mesh
            if self._cancelled:
                mesh.cancel("the job has failed")
        try:
            found = [_decode(each) for each in gather(msgspec.msgpack.encode(mesh.endpoint))]
            nowhere = Endpoint(-1, "", 0, 0, (), "")
            endpoints = [nowhere] * listener_settings.size
            for endpoint in found:
                endpoints[endpoint.rank] = endpoint
            own, others = mesh.endpoint, [rank for rank in self._ranks if rank != self._rank]
            keys = [key for rank in others for key in data_connections(own, endpoints[rank], self._role, self._group)]
            made = mesh.connect(endpoints, keys, listener_settings.generation, listener_settings.secret, deadline)
        finally:
            with self._lock:
                self._mesh = None
            mesh.close()
        return by_index(made, self._ranks)

    def cancel(self) -> None:
        """Make :meth:`connect` fail, now or later. Any thread may call it."""
        with self._lock:
            self._cancelled = True
            if self._mesh is not None:
                self._mesh.cancel("the job has failed")


def by_index(made: Mapping[ConnectionKey, Connection], members: Sequence[int]) -> dict[int, list[socket.socket]]:
    """The sockets of the connections with each member, by its index, in the order of their links."""
    found: dict[int, list[socket.socket]] = {}
    for key in sorted(made):
        found.setdefault(members.index(key.peer), []).append(made[key].socket)
    return found
