"""Tensors on GPUs of frameworks that show no streams and events in Python: what TensorFlow and JAX have in common.

PyTorch has streams, events and memory of its own (:mod:`horovod.torch.device`). Here they come from CUDA's driver library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from horovod._base.config import GPU_OPERATIONS
from horovod.comm.cuda import library, nvml
from horovod.comm.cuda.runtime import CudaRuntime
from horovod.comm.datatypes import DataType
from horovod.comm.device import DeviceFacts, names_in_view
from horovod.comm.spans import Spans, layout_of
from horovod.core.lifecycle.context import running
from horovod.core.requests import devices
from horovod.core.requests.devices import DeviceReadiness, ReductionTraits, carries_out, device_name
from horovod.core.requests.tensor import Tensor

_NOTHING = np.empty(0, np.uint8)


class CudaDevices:
    """The devices of this process, for the core. The first that is used in a generation serves all its collectives.

    Args:
        lacking: why the framework cannot use a GPU, with what to do about it; "" if it can.
        first: an address on the framework's first device, and what holds it; for a rank that has used none yet.
    """

    def __init__(self, lacking: Callable[[], str], first: Callable[[], tuple[int, object]]) -> None:
        self._lacking = lacking
        self._first = first
        self._lock = threading.Lock()
        self._runtime: CudaRuntime | None = None

    def facts(self) -> DeviceFacts:
        missing = self._lacking()
        if not missing and not library.present():
            missing = "this host has no driver for NVIDIA's GPUs: there is no /dev/nvidiactl"
        names = [] if missing else nvml.visible_gpus()
        if names is None:  # it cannot be asked
            names = names_in_view("cuda", library.visible())
        if not missing and not names:
            missing = "no GPU is visible: nvidia-smi shows them, and CUDA_VISIBLE_DEVICES may hide them"
        return DeviceFacts(tuple(names), missing)

    def runtime(self) -> CudaRuntime:
        return self.use(0)

    def use(self, address: int) -> CudaRuntime:
        """The device of this rank's collectives.

        Args:
            address: in the memory of the device that is wanted; 0 for any.

        Raises:
            ValueError: this rank's collectives use another one.
            OSError, CudaError: CUDA cannot be used.
        """
        with self._lock:
            runtime = self._runtime
            if runtime is None or address:
                held: object = None
                if not address:
                    address, held = self._first()
                cuda = runtime.cuda if runtime is not None else library.loaded()
                ordinal = cuda.ordinal(address)
                del held
                if runtime is None:
                    self._runtime = runtime = CudaRuntime(cuda, ordinal)
                elif runtime.ordinal != ordinal:
                    raise ValueError(
                        f"one tensor is on cuda:{ordinal}, and this rank's collectives use {runtime.device}: all "
                        f"must be on one device. With {GPU_OPERATIONS}=HOST a process may use several."
                    )
            return runtime

    def forget(self) -> None:
        """A generation ends; the next may use another device."""
        with self._lock:
            self._runtime = None

    def engine(self, data_types: Sequence[DataType], reduction: ReductionTraits | None) -> str:
        """The engine that carries out a collective on these devices' memory; "" if host memory must be used.

        The same on all ranks for the same arguments.
        """
        engine = running().device_engine
        if engine and devices.provider() is self and carries_out(engine, data_types, reduction):
            return engine
        return ""


class OnDevice:
    """One submission of device memory. The collective begins after all earlier work of the calling thread's current stream.

    Args:
        engine: of :meth:`CudaDevices.engine`.
    """

    def __init__(self, runtime: CudaRuntime, engine: str) -> None:
        self.device = device_name(engine)
        self._runtime = runtime
        self._ready = DeviceReadiness(self.device, runtime.record(runtime.current_stream()), [])

    def release(self) -> None:
        """Release all tensors: the caller has waited for the device."""
        self._ready.held.clear()

    def tensor(self, address: int, data_type: DataType, shape: Sequence[int], owner: object = None) -> Tensor:
        """Elements at an address as the core takes them. ``owner`` is held until the device has done with them."""
        elements = 1
        for dimension in shape:
            elements *= dimension
        if owner is not None:
            self._ready.held.append(owner)
        memory = Spans(layout_of(data_type.numpy, (elements,), self._runtime.device), [address])
        return Tensor(_NOTHING, data_type, tuple(shape), device_memory=memory, ready=self._ready)
