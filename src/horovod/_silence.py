"""Connections between two hosts of which one is silent. Engines and control connections report it with the same text.

A host acknowledges what arrives for its processes, also while they are busy or stopped. Where nothing is acknowledged, either
the network between the two addresses is broken or the host is gone: the process at the other end is not to blame.
"""

from __future__ import annotations

import errno
import socket

_SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


def is_silence(error: OSError) -> bool:
    """Whether the kernel has ended a connection because nothing came back, or because no way leads there any more."""
    return error.errno in _SILENCE


def ends_of(connection: socket.socket) -> str:
    """Both addresses of a connection, for messages; "" where it stays on one machine. Unknown once the connection has ended."""
    if connection.family == socket.AF_UNIX:
        return ""
    try:
        own, other = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return ""
    return f"from {own} to {other}" if own != other else ""


def silence(ends: str) -> str:
    """Why a rank is lost whose host is silent on the connection with these :func:`ends_of`."""
    return f"its host is silent on the connection {ends}, where nothing arrives: that network is broken, or the host is gone"
