"""Network interfaces of a job on Ray."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from typing import Any

import ray

from horovod._base.config import NCCL_SOCKET_INTERFACE, NETWORK_INTERFACE


def detect_nics(settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] = ()) -> list[str]:
    """The interfaces that the settings name, or those that all nodes have, without that of the loopback network.

    Args:
        settings: with an attribute ``nics``.
        all_host_names: accepted for compatibility.
        node_workers: one actor a node, with a method ``execute``; without any, the interfaces of this host count.
    """
    if settings.nics:
        return sorted(settings.nics)
    known: list[list[str]] = ray.get([worker.execute.remote(lambda _: _interfaces()) for worker in node_workers])
    common = set.intersection(*map(set, known)) if known else set(_interfaces())
    return sorted(common)


def nics_to_env_var(nics: Collection[str]) -> dict[str, str]:
    """The variables by which engines get the interfaces to use."""
    if not nics:
        return {}
    names = sorted(nics)
    return {NETWORK_INTERFACE: ",".join(names), NCCL_SOCKET_INTERFACE: ",".join(names)}


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex() if name != "lo"]
