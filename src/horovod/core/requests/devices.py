"""Devices whose memory an engine moves, as the core knows them: when a submission's vectors are ready, and which binding owns
the device.

A binding whose framework has such devices registers a :class:`Provider` when it is imported. ``init()`` decides for the whole
job whether an engine moves their memory, from the facts of all ranks (:class:`~horovod.comm.device.DeviceFacts`). So every rank
submits a request in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from horovod.comm.datatypes import DataType
from horovod.comm.device import GPU, DeviceFacts, DeviceRuntime
from horovod.comm.reduction import ReduceOp
from horovod.comm.select import engine as engine_called
from horovod.core.negotiation.agreement import list_ranks
from horovod.core.negotiation.messages import Request


class Provider(Protocol):
    """The devices of this process, as its framework knows them."""

    def facts(self) -> DeviceFacts:
        """The facts that are known before any device is used. Fast, and takes no memory of a device."""

    def runtime(self) -> DeviceRuntime:
        """The device that this rank uses for collectives: one for the whole generation."""


class DeviceReadiness(msgspec.Struct):
    """When the vectors of one submission may be accessed on a device.

    Attributes:
        device: the name that ranks compare, made by :func:`device_name`.
        marker: a marker of the device's runtime. The vectors must not be accessed before the device reaches it.
        held: objects that keep their memory alive.
    """

    device: str
    marker: Any
    held: list[Any]


class ReductionTraits(Protocol):
    """The properties that decide whether an engine supports a reduction;
    :class:`horovod._bindings.reductions.ReductionArguments` has them."""

    @property
    def op(self) -> ReduceOp: ...

    @property
    def scaled(self) -> bool:
        """Whether elements are multiplied or divided."""

    @property
    def factor(self) -> float:
        """The product of all factors."""


def carries_out(
    engine: str, data_types: Sequence[DataType], reduction: ReductionTraits | None, scales: bool = False
) -> bool:
    """Whether an engine for the memory of GPUs has a collective on elements of these types; None: it only moves them.

    Args:
        scales: the device multiplies vectors (:meth:`~horovod.comm.device.DeviceRuntime.scale`).
    """
    chosen = engine_called(engine, GPU)
    if reduction is None:
        return not chosen.lacks(data_types, None, False)
    return not chosen.lacks(data_types, reduction.op, reduction.scaled, reduction.factor, scales)


_provider: Provider | None = None


def provide(provider: Provider | None) -> None:
    """Register a framework's devices; the last call counts. Memory of another framework's devices is staged in host memory."""
    global _provider
    _provider = provider


def provider() -> Provider | None:
    """The framework's devices that are registered; None if no framework has any."""
    return _provider


def device_name(engine: str) -> str:
    """The device of requests that ``engine`` carries out on a GPU's memory, as ranks compare it."""
    return f"{GPU}:{engine}"


def engine_of(device: str) -> str:
    """The engine that carries out requests on this device; "" if it is the one for host memory."""
    kind, _, engine = device.partition(":")
    return engine if kind == GPU else ""


def moves(device: str, engine: str) -> bool:
    """Whether a request on this device is for that engine."""
    return device == device_name(engine)


@lru_cache(maxsize=4096)
def of_members(request: Request, members: tuple[int, ...], registration: int) -> Request:
    """A request of some ranks for the coordinator of all ranks. The registration distinguishes its name from the same name of
    other ranks, and of an earlier process set of the same ranks."""
    name = f"{request.name} on {list_ranks(members)}{f' (registration {registration})' if registration else ''}"
    return msgspec.structs.replace(request, name=name, members=members)


def members_of(ranks: Sequence[int], process_set_id: int | None) -> tuple[int, ...]:
    """The members as in :class:`Request`: none for the global process set."""
    return () if process_set_id == 0 else tuple(ranks)
