"""The address of a Slurm node: its name, or if that does not resolve, the address in Slurm's configuration."""

from __future__ import annotations

import re
import socket
import subprocess

_ASKING_SECONDS = 10


def address_of(node: str) -> str:
    """The address of a node: the name itself, if it resolves, else what ``scontrol show node`` says.

    Raises:
        ValueError: the name does not resolve, and Slurm knows no address.
    """
    if _resolves(node):
        return node
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASKING_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"the name of node {node} does not resolve, and scontrol cannot be asked: {error}") from None
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    if match is None or not _resolves(match[1]):
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(
            f"the name of node {node} does not resolve, and scontrol knows no address for it"
            + (f": {said[-1][:200]}" if said else "")
        )
    return match[1]


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
