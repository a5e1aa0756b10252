"""How the tasks of a stage exchange what they know. Each function is called by all of them, and returns the values of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.control.dial import Address
from horovod.control.rendezvous.client import RendezvousClient

_CONNECT_SECONDS = 60.0


def at_barrier(context: Any, value: str) -> list[str]:
    """Through Spark's own coordinator, so no task connects to the driver.

    Args:
        context: the task's ``BarrierTaskContext``.
    """
    return list(context.allGather(value))


def at_driver(
    addresses: Sequence[tuple[str, int]], secret: bytes, index: int, size: int, value: str, seconds: float
) -> list[str]:
    """Through a server in the driver, for tasks that are not those of a barrier stage.

    Args:
        addresses: of the server.
        secret: of the server.
        index: the task's partition.
        size: how many tasks there are.
        seconds: how long the others may take to start.

    Raises:
        TimeoutError: not all tasks have come in time.
        horovod.control.rendezvous.messages.RendezvousError: the server cannot be reached.
    """
    candidates: list[Address] = list(addresses)
    with RendezvousClient(candidates, secret, _CONNECT_SECONDS) as client:
        return [each.decode() for each in client.exchange("spark/start", index, size, value.encode(), seconds)]
