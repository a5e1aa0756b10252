"""Finds the sockets of one Gloo group in this process. Gloo does not expose them, and cannot be interrupted in another way.

While Gloo connects, the ranks exchange the addresses at which they listen. A group's connections are those that this rank has
accepted at its own address, or that it has opened to another rank's address.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


def sockets_of(own: Collection[bytes], others: Collection[bytes]) -> list[int]:
    """The descriptors of a group's connections, without its listening sockets: Gloo ends the process when one of those fails.

    Args:
        own, others: the values that this rank and the others have put into Gloo's store; they contain the listening addresses
            as the kernel represents them.
    """
    found = []
    for descriptor in _descriptors():
        with _socket(descriptor) as each:
            if each is None:
                continue
            try:
                here, there = each.getsockname(), each.getpeername()
            except OSError:
                continue  # not connected, or no longer
            if _published(here, own) or _published(there, others):
                found.append(descriptor)
    return found


def shut_down(descriptors: Collection[int]) -> None:
    """Shut down the connections of these sockets, so that every operation that waits for them fails."""
    for descriptor in descriptors:
        with _socket(descriptor) as each:
            try:
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the connection is already closed


def _descriptors() -> list[int]:
    try:
        return [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []  # the system has no /proc


@contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket | None]:
    """A duplicate of the TCP socket of a descriptor; None if the descriptor is something else."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            yield None
            return
        own = os.dup(descriptor)
    except OSError:
        yield None  # closed meanwhile
        return
    with socket.socket(fileno=own) as made:
        yield made if made.family in (socket.AF_INET, socket.AF_INET6) and made.type == socket.SOCK_STREAM else None


def _published(address: tuple[str, int], values: Collection[bytes]) -> bool:
    host, port = address[:2]
    if ":" in host:
        family = struct.pack("=H", socket.AF_INET6) + struct.pack("!H", port)
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        return any(family in value and packed in value for value in values)
    kernel = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    return any(kernel in value for value in values)
