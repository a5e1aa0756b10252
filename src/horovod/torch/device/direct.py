"""Tensors on a device whose memory an engine moves: they are handed over where they lie, and nobody waits for the device.

    caller's stream   ──kernels──┐ready      ┌── arrive() ──▶ kernels that use the result
    engine's stream              └──collective┘event

* A submission is announced at once. The engine's stream waits for the point that the caller's current stream had reached
  then, so the host does not.
* The handle is done when the collective is queued. ``synchronize()`` has the caller's current stream wait for the event
  behind it.
* The core holds the tensors until that event is over, so ``record_stream`` is not needed for them. What is made on the
  engine's stream belongs to it, and is marked for the caller's stream by ``arrive()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from horovod.comm.spans import Spans, layout_of
from horovod.core.config import GPU_OPERATIONS
from horovod.core.requests.devices import Ready, device_name
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.device.base import InPlace
from horovod.torch.device.runtime import TorchRuntime
from horovod.torch.ops.tensors import check

_NOTHING = np.empty(0, np.uint8)


class Direct(InPlace):
    """One submission of device memory; implements :class:`horovod.torch.device.base.Memory`."""

    def __init__(self, runtime: TorchRuntime, engine: str, stream: object) -> None:
        if runtime.capturing():
            raise ValueError("a collective cannot be captured in a CUDA graph; leave it outside of the graph")
        self.device = device_name(engine)
        self._runtime = runtime
        self._stream = stream
        self._ready = Ready(self.device, runtime.record(runtime.current_stream()), [])
        self._grown: list[torch.Tensor] = []

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        def allocate(index: int, rows: int) -> Spans:
            like = tensors[index]
            with self._runtime.on(self._stream):
                outputs[index] = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
            self._grown.append(outputs[index])
            place = self.view(outputs[index]).place
            assert place is not None
            return place

        return allocate

    def arrive(self, handle: Handle) -> None:
        if handle.event is None:
            return
        handle.event.wait()
        stream = self._runtime.current_stream()
        for tensor in self._grown:
            tensor.record_stream(stream)

    def arrived(self, handle: Handle) -> bool:
        return handle.event is None or handle.event.query()

    def view(self, tensor: torch.Tensor) -> Tensor:
        data_type = check(tensor)
        if tensor.device != self._runtime.torch_device:
            raise ValueError(
                f"Tensors in list must be on same device, and those of all collectives of a process. One is on "
                f"{self._runtime.device}, another on {tensor.device}. With {GPU_OPERATIONS}=HOST a process may use "
                "several."
            )
        self._ready.held.append(tensor.detach())
        layout = layout_of(data_type.numpy, (tensor.numel(),), self._runtime.device)
        place = Spans(layout, [tensor.data_ptr()])
        return Tensor(_NOTHING, data_type, tuple(tensor.shape), place=place, ready=self._ready)
