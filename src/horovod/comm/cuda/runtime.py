"""A device by CUDA's driver library, for engines that move its memory: streams, events, memory, copies.

A binding says with :meth:`CudaRuntime.on` on which of its framework's streams the calling thread computes. If the framework
exposes no stream, the host orders the work: the device's work is complete when the binding calls, and the binding waits for
results itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from horovod.comm.cuda.library import BLOCKING_SYNC, DISABLE_TIMING, NON_BLOCKING, Cuda, CudaError
from horovod.comm.device import DeviceRuntime, OwnedSpans
from horovod.comm.spans import Spans, address_of, layout_of

_REACHED = object()
"""The marker of work that was complete when it was recorded."""


class _Own:
    """An object of the library, known by its address. It is released with the last reference to this object.

    Args:
        end: the function that releases it; called with the address and ``arguments``.
    """

    def __init__(self, runtime: CudaRuntime, address: int | None, end: str, *arguments: Any) -> None:
        self.address = address or 0
        self._runtime, self._end, self._arguments = runtime, end, arguments

    def __del__(self) -> None:
        with suppress(CudaError), self._runtime.chosen():  # the library may have ended before the interpreter
            self._runtime.cuda.call(self._end, self.address, *self._arguments)


class _TheirStream:
    """A stream of the framework."""

    def __init__(self, address: int) -> None:
        self.address = address


class CudaRuntime(DeviceRuntime):
    """One device.

    Args:
        cuda: the library.
        ordinal: CUDA's number of the device in this process.

    Raises:
        CudaError: the device cannot be used.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self.device = f"cuda:{ordinal}"
        self._local = threading.local()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        cuda.call("cuDeviceGet", ctypes.byref(device), ordinal)
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._device, self._context = device.value, context.value

    def __del__(self) -> None:
        if hasattr(self, "_context"):  # absent if __init__ failed
            self.cuda.functions.cuDevicePrimaryCtxRelease_v2(self._device)

    def __repr__(self) -> str:
        return self.device

    @contextmanager
    def chosen(self) -> Iterator[None]:
        self.cuda.call("cuCtxPushCurrent_v2", self._context)
        try:
            with self.cuda.beside_captures():
                yield
        finally:
            self.cuda.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """A block in which the framework's stream with this address is the current stream of the calling thread."""
        self._local.stream = _TheirStream(stream)
        try:
            yield
        finally:
            self._local.stream = None

    def new_stream(self) -> Any:
        least, greatest, made = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        with self.chosen():
            self.cuda.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            self.cuda.call("cuStreamCreateWithPriority", ctypes.byref(made), NON_BLOCKING, greatest.value)
        return _Own(self, made.value, "cuStreamDestroy_v2")

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", None)

    def stream_address(self, stream: Any) -> int:
        return int(stream.address)

    def record(self, stream: Any) -> Any:
        if stream is None:
            return _REACHED
        made = ctypes.c_void_p()
        with self.chosen():
            self.cuda.call("cuEventCreate", ctypes.byref(made), DISABLE_TIMING | BLOCKING_SYNC)
            event = _Own(self, made.value, "cuEventDestroy_v2")
            self.cuda.call("cuEventRecord", event.address, stream.address)
        return event

    def wait(self, stream: Any, marker: Any) -> None:
        if marker is _REACHED:
            return
        with self.chosen():
            if stream is None:
                self.cuda.call("cuEventSynchronize", marker.address)
            else:
                self.cuda.call("cuStreamWaitEvent", stream.address, marker.address, 0)

    def query(self, marker: Any) -> bool:
        if marker is _REACHED:
            return True
        with self.chosen():
            return self.cuda.reached(marker.address)

    def allocate(self, dtype: np.dtype[Any], length: int, stream: Any, value: Any = None) -> OwnedSpans:
        layout = layout_of(dtype, (length,), self.device)
        made = ctypes.c_void_p()
        filled = None
        with self.chosen():
            self.cuda.call("cuMemAllocAsync", ctypes.byref(made), max(layout.nbytes, 1), stream.address)
            memory = _Memory(self, made.value, stream)
            if value is not None and length:
                filled = np.full(length, value, dtype)
                if filled.view(np.uint8).any():
                    source = address_of(filled)
                    self.cuda.call("cuMemcpyHtoDAsync_v2", memory.address, source, layout.nbytes, stream.address)
                else:
                    self.cuda.call("cuMemsetD8Async", memory.address, 0, layout.nbytes, stream.address)
        # The stream copies ``filled`` later, so it must live as long as the memory.
        return OwnedSpans(layout, [memory.address], owner=(memory, filled))

    def copy(self, stream: Any, sources: Spans, targets: Spans) -> None:
        lengths = sources.layout.lengths.tolist()
        with self.chosen():
            for source, target, length in zip(sources.addresses, targets.addresses, lengths, strict=True):
                if length and source != target:
                    self.cuda.call("cuMemcpyDtoDAsync_v2", target, source, length, stream.address)


class _Memory(_Own):
    """Memory of the device. Work that was queued on its stream before its release may use it until that work is done."""

    def __init__(self, runtime: CudaRuntime, address: int | None, stream: Any) -> None:
        super().__init__(runtime, address, "cuMemFreeAsync", stream.address)
        self._stream = stream
