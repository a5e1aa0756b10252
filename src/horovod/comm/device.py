"""The interface between an engine for device memory and the framework that owns the memory: streams, events, memory, copies.

A binding implements :class:`DeviceRuntime` with its framework's own streams and allocator, so that no engine imports a
framework. Streams and markers are opaque to engines: only the runtime knows their types.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from horovod.comm.spans import Spans

GPU = "gpu"
"""The kind of device for GPUs; HOROVOD_GPU_OPERATIONS names its engine."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a rank knows about its devices before it uses one.

    Attributes:
        gpus: identifiers of the GPUs that this process may use, different for each GPU of the host. Slices of one GPU (MIG)
            have its identifier.
        missing: why no GPU can be used, and what to do about it; "" if one can.
    """

    gpus: tuple[str, ...] = ()
    missing: str = (
        "the framework passes no device memory: only horovod.torch, horovod.tensorflow and horovod.keras on JAX do"
    )


NO_DEVICES = DeviceFacts()

_VIEWS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def names_in_view(kind: str, count: int) -> list[str]:
    """Identifiers of the ``count`` visible devices of a kind, for use when their UUIDs are not known.

    Two processes that see different devices under the same numbers must not appear to share devices. So an identifier has the
    environment variables that restrict which devices are visible, and the number.
    """
    view = ";".join(os.environ.get(name, "") for name in _VIEWS)
    return [f"{kind} {view} {number}" for number in range(count)]


def shared_by(hosts: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[str]:
    """By rank, why not every rank of its host can have a separate GPU; "" if every rank can.

    Args:
        hosts: the host name of each rank.
        gpus: the identifiers of :class:`DeviceFacts` by rank; empty for a rank that needs no separate GPU, whose host is then
            not checked.
    """
    reasons = []
    for host in hosts:
        there = [set(each) for each, other in zip(gpus, hosts, strict=True) if other == host]
        seen = set[str]().union(*there)
        few = all(there) and len(seen) < len(there)
        reasons.append(
            f"{len(there)} ranks of host {host} share {len(seen)} GPU{'s' * (len(seen) != 1)}" if few else ""
        )
    return reasons


class OwnedSpans(Spans, gc=True):
    """Spans that hold their memory.

    Attributes:
        owner: an object that keeps the memory alive.
    """

    owner: Any = None


class DeviceRuntime(ABC):
    """One device, as its framework knows it. Any thread may call every method.

    No method waits for the device, except :meth:`wait` with None for the stream.

    Attributes:
        device: its name, for example ``cuda:1``.
    """

    device: str

    scales: ClassVar[bool] = False
    """Whether :meth:`scale` is implemented."""

    @abstractmethod
    def chosen(self) -> AbstractContextManager[Any]:
        """A block in which the device is the calling thread's current one, and in which the thread's calls invalidate no
        capture of a graph."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A new stream with high priority."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The current stream of the calling thread. None if the framework exposes no stream: then the thread's work on the
        device is complete before it submits a collective, and it waits for results itself."""

    @abstractmethod
    def stream_address(self, stream: Any) -> int:
        """The stream as C functions take it: a ``cudaStream_t`` or ``hipStream_t``."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """A marker of the present end of the stream's work. For None, a marker that is already reached."""

    @abstractmethod
    def wait(self, stream: Any, marker: Any) -> None:
        """Make later work of the stream wait for the marker. For None, return when the marker is reached."""

    @abstractmethod
    def query(self, marker: Any) -> bool:
        """Whether all work before the marker is done. Raises an error of the device."""

    @abstractmethod
    def allocate(self, dtype: np.dtype[Any], length: int, stream: Any, value: Any = None) -> OwnedSpans:
        """A new vector, which the stream fills with ``value`` (uninitialized for None). After the vector is released, later
        work of the same stream may get its memory."""

    @abstractmethod
    def copy(self, stream: Any, sources: Spans, targets: Spans) -> None:
        """Copy each source to the target of the same index and size, in as few device operations as possible."""

    def scale(self, stream: Any, sources: Spans, targets: Spans, factor: float) -> None:
        """Write each source, multiplied by ``factor``, to the target of the same index and size, which may be the source.
        16-bit types are multiplied in float32 and rounded once.

        Raises:
            TypeError: the runtime does not implement it (:attr:`scales`).
        """
        raise TypeError(f"the runtime of {self.device} has no kernel that multiplies vectors")
