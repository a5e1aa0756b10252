"""Connections between two hosts when one host is silent. Engines and control connections report it with the same text.

A host acknowledges data for its processes even while they are busy or stopped. If nothing is acknowledged, the network between
the two addresses is broken or the host is gone; the process at the other end is not the cause.
"""

from __future__ import annotations

import errno
import socket

_SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


def is_silence(error: OSError) -> bool:
    """Whether the kernel has ended a connection because nothing came back, or because there is no route to the other host any
    more."""
    return error.errno in _SILENCE


def ends_of(connection: socket.socket) -> str:
    """Both addresses of a connection, for messages; "" within one machine. Unknown once the connection has ended."""
    if connection.family == socket.AF_UNIX:
        return ""
    try:
        own, other = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return ""
    return f"from {own} to {other}" if own != other else ""


def silent_host_reason(ends: str) -> str:
    """The reason why a rank is lost if its host is silent on the connection with these :func:`ends_of`."""
    return f"its host is silent on the connection {ends}, where nothing arrives: that network is broken, or the host is gone"
