"""Ports that nobody uses, and that the kernel gives to nobody who asks for any: it takes those from 32768 on."""

from __future__ import annotations

import random
import socket

_CANDIDATES = range(20_000, 32_000)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """So many different ones, free at all addresses.

    Raises:
        OSError: a hundred ports more than that are not enough to find them.
    """
    found = []
    for port in random.sample(_CANDIDATES, number + 100):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"{number} ports are not free: {found} are")
