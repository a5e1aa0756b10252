"""Which engine moves the memory of GPUs: what each rank tells the others about its GPUs, and the choice that follows.

All ranks choose from the same reports, so all get the same engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from horovod._base.config import GPU_OPERATIONS
from horovod.comm.device import GPU, DeviceFacts, shared_by
from horovod.comm.engine import EngineGroup
from horovod.comm.select import Support, device_engine, not_alone, obstacles
from horovod.core.requests import devices

_log = logging.getLogger("horovod.core")


class DeviceReport(msgspec.Struct, array_like=True):
    """A rank's message about its GPUs to all others in ``init()``."""

    forced: str = ""
    """The engine for GPUs that is forced, "" for none."""
    obstacles: dict[str, str] = {}
    """By engine for GPUs, why this rank cannot use it; "" if it can."""
    gpus: list[str] = []
    """The GPUs that it may use; empty where several ranks may share one."""


def own_report(rank: int, size: int, forced: str, warns: bool) -> DeviceReport:
    """This rank's message to the others.

    Args:
        forced: HOROVOD_GPU_OPERATIONS of this rank.
        warns: whether this rank logs a warning if it has a GPU and no engine can be used here. One rank of each host does.
    """
    provider = devices.provider()
    facts = DeviceFacts() if provider is None else provider.facts()
    group = EngineGroup(rank, size, ("",) * size, facts=facts)
    found = obstacles(group, forced, device=GPU)
    if warns and facts.gpus and not facts.missing and all(found.values()):
        for reason in found.values():
            _log.warning("tensors on GPUs travel through host memory: %s", reason)
    return DeviceReport(forced, found, list(facts.gpus) if not_alone() else [])


def choose(hosts: Sequence[str], reports: Sequence[DeviceReport]) -> str:
    """The engine that moves the memory of all ranks' GPUs; "" if tensors are staged in host memory. The same on all ranks.

    Args:
        hosts, reports: by rank, its host and its report.

    Raises:
        EngineError: a forced engine cannot be used on some rank; the message says why and what to do.
    """
    found = [dict(report.obstacles) for report in reports]
    shared = shared_by(hosts, [report.gpus for report in reports])
    for known, reason in zip(found, shared, strict=True):
        for name, obstacle in known.items():
            known[name] = obstacle or (reason and f"{reason}, and {not_alone()}")
    support = {rank: Support(report.forced, found[rank]) for rank, report in enumerate(reports)}
    engine, why = device_engine(support, GPU_OPERATIONS)
    provider = devices.provider()
    if not engine and provider is not None and provider.facts().gpus:
        _log.info("tensors on GPUs travel through host memory (%s)", why)
    return engine
