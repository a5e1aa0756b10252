"""Tensors on a device whose memory an engine moves. The engine uses them in place, and the host never waits for the device.

    caller's stream   ──kernels──┐ready      ┌── arrive() ──▶ kernels that use the result
    engine's stream              └──collective┘event

* A submission is announced at once. The engine's stream waits for the point that the caller's current stream had reached at the
  submission, so the host need not wait.
* The handle is done when the collective is queued. ``synchronize()`` makes the caller's current stream wait for the event that
  follows the collective.
* The core holds the tensors until that event has completed, or until ``arrive()``. After ``arrive()``, later work of the
  caller's stream waits for the event, and so does the next user of the tensors' memory on that stream. So the memory of a
  gradient that the script releases after a step can be reused in the next step, even if the device is late.
* If the current stream in ``arrive()`` is not that of the submission, ``arrive()`` marks the tensors for the current stream
  (``record_stream``). It always marks outputs that were allocated on the engine's stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from horovod._base.config import GPU_OPERATIONS
from horovod.comm.spans import Spans, layout_of
from horovod.core.requests.devices import DeviceReadiness, device_name
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.device.base import InPlace, refuse_in_capture
from horovod.torch.device.runtime import TorchRuntime
from horovod.torch.tensors import check

_NOTHING = np.empty(0, np.uint8)


class TorchDeviceMemory(InPlace):
    """One submission of device memory; implements :class:`horovod.torch.device.base.TorchMemory`.

    Args:
        runtime: the device.
        engine: the name of the engine.
        stream: the engine's stream, on which outputs of unknown size are allocated.

    Raises:
        ValueError: the caller's current stream is being captured into a graph.
    """

    def __init__(self, runtime: TorchRuntime, engine: str, stream: object) -> None:
        refuse_in_capture(runtime.capturing())
        self.device = device_name(engine)
        self._runtime = runtime
        self._stream = stream
        self._submitted_on = runtime.current_stream()
        self._ready = DeviceReadiness(self.device, runtime.record(self._submitted_on), [])
        self._grown: list[torch.Tensor] = []

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        def allocate(index: int, rows: int) -> Spans:
            like = tensors[index]
            with self._runtime.on(self._stream):
                outputs[index] = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
            self._grown.append(outputs[index])
            memory = self.view(outputs[index]).device_memory
            assert memory is not None
            return memory

        return allocate

    def arrive(self, handle: Handle) -> None:
        if handle.event is None:
            return
        refuse_in_capture(self._runtime.capturing())
        handle.event.wait()
        stream = self._runtime.current_stream()
        for tensor in self._grown:
            tensor.record_stream(stream)
        if stream != self._submitted_on:
            for memory in self._ready.held:
                self._runtime.record_stream(memory, stream)
        self._ready.held.clear()

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
        self._ready.held.append(self._runtime.memory_of(tensor))
        layout = layout_of(data_type.numpy, (tensor.numel(),), self._runtime.device)
        memory = Spans(layout, [tensor.data_ptr()])
        return Tensor(_NOTHING, data_type, tuple(tensor.shape), device_memory=memory, ready=self._ready)
