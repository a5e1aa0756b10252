"""The endpoints at which the ranks of a job receive messages, and connections to the ranks that this one sends to.

From its first send or receive on, a rank listens, and has published its endpoint in the store of the default group. A sender
looks the endpoint up there, on a thread that ends when the connection is made.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from horovod.control.connection import Connection
from horovod.control.dial import Address, anywhere, dial_until, listening_socket
from horovod.control.mesh import own_addresses
from horovod.core.lifecycle.generation import Generation
from horovod.torch.distributed.store import has_key

_PAUSE_SECONDS = (0.001, 0.1)


class PeerEndpoint(msgspec.Struct, array_like=True):
    """The endpoint at which a rank receives messages."""

    host: str
    name: str
    """The name of its Unix socket."""
    addresses: tuple[str, ...]
    port: int
    process_namespace: str


_decode = msgspec.msgpack.Decoder(PeerEndpoint).decode


class Listening:
    """This rank's listening sockets.

    Args:
        generation: the runtime.
        namespace: this process's namespace, see :func:`~horovod.control.processes.own_process_namespace`.

    Attributes:
        sockets: a TCP socket, and a Unix socket for ranks on this host.
        endpoint: the endpoint to publish.
    """

    def __init__(self, generation: Generation, namespace: str) -> None:
        identity = generation.identity
        alone = identity.local_size == identity.size
        addresses = ("127.0.0.1",) if alone else own_addresses(generation.config.network_interfaces)
        self.sockets: list[socket.socket] = []
        try:
            tcp = listening_socket("127.0.0.1" if alone else anywhere(addresses), 0)
            self.sockets.append(tcp)
            unix = self._open(socket.AF_UNIX)
            name = f"\0horovod-messages-{os.getpid()}-{secrets.token_hex(8)}"
            unix.bind(name)
            for each in self.sockets:
                each.listen(128)
        except OSError:
            self.close()
            raise
        self.endpoint = PeerEndpoint(identity.hostname, name, addresses, tcp.getsockname()[1], namespace)

    def _open(self, family: socket.AddressFamily) -> socket.socket:
        made = socket.socket(family, socket.SOCK_STREAM)
        self.sockets.append(made)
        return made

    def close(self) -> None:
        for each in self.sockets:
            each.close()


class PeerDirectory:
    """The endpoints of all ranks, in the store of the default group.

    Args:
        store: the store of the default group.
        generation: the runtime. It is part of the keys, because an earlier runtime may have used the same store.
    """

    def __init__(self, store: Any, generation: Generation) -> None:
        self._store = store
        self._prefix = f"horovod/messages/{generation.mark}"

    def publish(self, rank: int, endpoint: PeerEndpoint) -> None:
        self._store.set(f"{self._prefix}/{rank}", msgspec.msgpack.encode(endpoint))

    def look_up(self, rank: int, over: Callable[[], bool]) -> PeerEndpoint | None:
        """Wait until ``rank`` has published its endpoint, and return it; None if ``over()`` is true before that."""
        pause, longest = _PAUSE_SECONDS
        key = f"{self._prefix}/{rank}"
        while not over():
            if has_key(self._store, key):
                return _decode(self._store.get(key))
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return None


def connect(
    directory: PeerDirectory,
    generation: Generation,
    rank: int,
    over: Callable[[], bool],
    made: Callable[[Connection | None, PeerEndpoint | None, str], None],
) -> threading.Thread:
    """Start a thread that connects to a rank, however late that rank makes its first send or receive. Returns the thread.

    Args:
        directory: where the rank publishes its endpoint.
        generation: the runtime.
        rank: the global rank.
        over: whether to give up; then ``made`` is not called.
        made: called once on the thread, with the connection, the rank's endpoint and ""; or with None, None and the reason why
            there is no connection.
    """
    identity = generation.identity

    def dial() -> None:
        try:
            endpoint = directory.look_up(rank, over)
            if endpoint is None:
                return
            addresses: list[Address] = [(address, endpoint.port) for address in endpoint.addresses]
            if endpoint.host == identity.hostname:
                addresses = [endpoint.name, ("127.0.0.1", endpoint.port), *addresses]
            deadline = time.monotonic() + generation.config.timeout.total_seconds()
            purpose = str(identity.rank).encode()
            cancelled = "the process group has ended"
            connection = dial_until(
                addresses, generation.secret, purpose, deadline, cancelled=lambda: cancelled if over() else ""
            )
            made(connection, endpoint, "")
        except Exception as error:  # from the store or the network
            if not over():
                made(None, None, f"cannot connect to rank {rank} to send it a message: {error}")

    thread = threading.Thread(target=dial, name=f"horovod-messages-to-{rank}", daemon=True)
    thread.start()
    return thread
