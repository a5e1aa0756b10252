"""Chooses the memory of one submission's tensors, which the core reads and writes.

An operation calls :func:`memory_of` for its tensors and submits what ``read``, ``write``, ``reduce`` or ``grow`` return. When
the handle is done, it calls ``arrive``. The core gets host memory directly, and device memory directly if an engine moves it
(:mod:`horovod.torch.device.direct`); otherwise it gets copies of device memory (:mod:`horovod.torch.device.staging`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.datatypes import Array
from horovod.comm.nccl.engine import stream_of
from horovod.core.lifecycle.context import running
from horovod.core.negotiation.messages import HOST
from horovod.core.requests import devices
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate
from horovod.torch.device import staging
from horovod.torch.device.base import InPlace, TorchMemory
from horovod.torch.device.direct import TorchDeviceMemory
from horovod.torch.device.runtime import IN_MEMORY, TorchRuntime, torch_devices
from horovod.torch.tensors import check, empty, flat_array, view


class TorchHostMemory(InPlace):
    """Host memory, which the core uses without a copy."""

    device = HOST
    view = staticmethod(view)

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        def allocate(index: int, rows: int) -> Array:
            like = tensors[index]
            outputs[index] = empty((rows, *like.shape[1:]), like.dtype, like.device)
            return flat_array(outputs[index])

        return allocate

    def arrive(self, handle: Handle) -> None:
        pass

    def arrived(self, handle: Handle) -> bool:
        return True


host_memory = TorchHostMemory()


def memory_of(tensors: Sequence[torch.Tensor], reduction: ReductionArguments | None = None) -> TorchMemory:
    """The memory of a submission's tensors. The collective reads the results of all earlier work of the caller's current
    stream.

    Args:
        tensors: the tensors, on one device.
        reduction: the reduction; None for a collective that only moves elements.

    Raises:
        ValueError: the first tensor cannot be communicated. The others are checked when they are read or written.
    """
    if not tensors or (isinstance(tensors[0], torch.Tensor) and tensors[0].is_cpu):
        return host_memory
    check(tensors[0])
    device = tensors[0].device
    name = running().device_engine
    usable = name and device.type in IN_MEMORY and devices.provider() is torch_devices
    if usable and devices.carries_out(name, [check(tensor) for tensor in tensors], reduction, TorchRuntime.scales):
        runtime = torch_devices.use(device)
        return TorchDeviceMemory(runtime, name, stream_of(runtime))
    return staging.Staged(staging.port(device))
