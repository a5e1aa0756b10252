"""The gradients that this rank has sent, as its flight recorder has them. Runs on ranks."""

from __future__ import annotations

from horovod.core.lifecycle.context import running
from horovod.observe.flight_recorder import FlightRecorder, Record


def recorder() -> FlightRecorder:
    found = running().workers[0].recorder
    assert found is not None
    return found


def submitted() -> int:
    """How many collectives of all kinds there were until now."""
    return recorder().count


def sent_gradients(since: int) -> list[Record]:
    """The requests with gradients of all optimizers, after that many collectives."""
    return [
        each
        for each in recorder().ring.copy()
        if each.number > since
        and each.request.name.startswith("DistributedOptimizer.")
        and not each.request.name.endswith(".pass")
    ]
