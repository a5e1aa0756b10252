"""CUDA's driver library, called through ctypes.

TensorFlow and JAX expose no streams and events in Python, so this module provides them. It uses the driver's library, and
not the runtime's (libcudart), for three reasons. Every host with a GPU has the driver's library, under one name. Its errors
do not become the thread's last error, which the framework would take for its own. A thread can work on one device and return
to its former device without making a context on device 0, which the runtime's ``cudaSetDevice`` would make. The contexts are
the devices' primary ones, which the frameworks and NCCL use as well. A comment above each function's types has its C
prototype. HIP has no such library, so on ROCm these frameworks use host memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from horovod.comm.base import DeviceFailure
from horovod.comm.cuda import nvml

SUCCESS = 0
NOT_READY = 600
"""The result of ``cuEventQuery`` for an event that is not complete."""

BLOCKING_SYNC, DISABLE_TIMING = 1, 2  # CU_EVENT_BLOCKING_SYNC (a waiting thread sleeps), CU_EVENT_DISABLE_TIMING
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_FILE = "libcuda.so.1"
_int, _unsigned, _size, _address = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_pointer = ctypes.POINTER

_PROTOTYPES: dict[str, list[Any]] = {
    # CUresult cuInit(unsigned int Flags)
    "cuInit": [_unsigned],
    # CUresult cuGetErrorString(CUresult error, const char **pStr)
    "cuGetErrorString": [_int, _pointer(ctypes.c_char_p)],
    # CUresult cuDeviceGet(CUdevice *device, int ordinal)
    "cuDeviceGet": [_pointer(_int), _int],
    # CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev), cuDevicePrimaryCtxRelease(CUdevice dev)
    "cuDevicePrimaryCtxRetain": [_pointer(_address), _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    # CUresult cuCtxPushCurrent(CUcontext ctx), cuCtxPopCurrent(CUcontext *pctx)
    "cuCtxPushCurrent_v2": [_address],
    "cuCtxPopCurrent_v2": [_pointer(_address)],
    # CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
    "cuThreadExchangeStreamCaptureMode": [_pointer(_int)],
    # CUresult cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
    "cuCtxGetStreamPriorityRange": [_pointer(_int), _pointer(_int)],
    # CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
    "cuPointerGetAttribute": [_address, _int, _address],
    # CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
    "cuStreamCreateWithPriority": [_pointer(_address), _unsigned, _int],
    # CUresult cuStreamDestroy(CUstream hStream)
    "cuStreamDestroy_v2": [_address],
    # CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
    "cuStreamWaitEvent": [_address, _address, _unsigned],
    # CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags)
    "cuEventCreate": [_pointer(_address), _unsigned],
    # CUresult cuEventRecord(CUevent hEvent, CUstream hStream)
    "cuEventRecord": [_address, _address],
    # CUresult cuEventQuery(CUevent hEvent), cuEventSynchronize(CUevent hEvent), cuEventDestroy(CUevent hEvent)
    "cuEventQuery": [_address],
    "cuEventSynchronize": [_address],
    "cuEventDestroy_v2": [_address],
    # CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
    "cuMemAllocAsync": [_pointer(_address), _size, _address],
    # CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
    "cuMemFreeAsync": [_address, _address],
    # CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
    "cuMemsetD8Async": [_address, ctypes.c_ubyte, _size, _address],
    # CUresult cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
    "cuMemcpyHtoDAsync_v2": [_address, _address, _size, _address],
    # CUresult cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
    "cuMemcpyDtoDAsync_v2": [_address, _address, _size, _address],
}


_KEEP_INTERPRETER_LOCK = frozenset(
    {
        "cuGetErrorString",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetStreamPriorityRange",
        "cuPointerGetAttribute",
        "cuEventQuery",
    }
)
"""Calls that only query or set a state of the thread. They keep the interpreter lock: if another Python thread computes,
releasing the lock costs more than the call. Calls that queue work on a stream release the lock: they wait if the device's
queue is full."""


class CudaError(DeviceFailure):
    """A call of CUDA has failed."""


class Cuda:
    """The loaded library.

    Args:
        functions: an object with the C functions as attributes, their types set; or a stand-in.
    """

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    @classmethod
    def load(cls, path: str) -> Cuda:
        """Load the library from a file, check that it has all functions, and initialise it.

        Raises:
            OSError: the file cannot be loaded, or is too old; the message says which version is needed.
            CudaError: there is no device that the library can use.
        """
        releasing, keeping = ctypes.CDLL(path), ctypes.PyDLL(path)
        functions = SimpleNamespace()
        for name, arguments in _PROTOTYPES.items():
            try:
                function = getattr(keeping if name in _KEEP_INTERPRETER_LOCK else releasing, name)
            except AttributeError:
                raise OSError(f"{path} has no {name}: a driver for CUDA 11.2 or newer is needed") from None
            function.restype, function.argtypes = _int, arguments
            setattr(functions, name, function)
        cuda = cls(functions)
        cuda.call("cuInit", 0)
        return cuda

    def call(self, name: str, *arguments: Any) -> None:
        """Make one call. Raises CudaError, with CUDA's message, unless it succeeds."""
        result = getattr(self.functions, name)(*arguments)
        if result != SUCCESS:
            message = ctypes.c_char_p()
            self.functions.cuGetErrorString(result, ctypes.byref(message))
            text = (message.value or b"unknown error").decode(errors="replace")
            raise CudaError(f"{name.removesuffix('_v2')}: CUDA says {text!r} (code {result})")

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """A block in which this thread's calls are allowed, and invalidate no capture, while any thread captures a graph.

        While a thread captures in CUDA's default mode, no other thread may query events or allocate memory.
        """
        mode = ctypes.c_int(RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def reached(self, event: int) -> bool:
        """Whether all work before an event is done. Raises CudaError if the work has failed."""
        result = self.functions.cuEventQuery(event)
        if result == SUCCESS:
            return True
        if result != NOT_READY:
            self.call("cuEventQuery", event)
        return False

    def ordinal(self, address: int) -> int:
        """CUDA's number of the device whose memory has this address. It may differ from the number in a framework, which
        numbers only the devices that it uses.

        Raises:
            CudaError: the address is not in the memory of a device.
        """
        found = ctypes.c_int(-1)
        self.call("cuPointerGetAttribute", ctypes.byref(found), DEVICE_ORDINAL, address)
        return found.value


def present() -> bool:
    """Whether this host has a driver for NVIDIA's GPUs. Loads no library."""
    return Path("/dev/nvidiactl").exists()


def visible() -> int:
    """How many devices this process may use, from NVML, or else from ``/dev``, and from CUDA_VISIBLE_DEVICES.

    CUDA's own library must not be called for this: it reads CUDA_VISIBLE_DEVICES at its first call, and scripts set that
    variable, or the devices of their framework, after ``hvd.init()``.
    """
    known = nvml.visible_gpus()
    if known is not None:
        return len(known)
    count = sum(1 for each in Path("/dev").glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal())
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return count
    chosen = [each.strip() for each in value.split(",")]
    chosen = chosen[: chosen.index("-1")] if "-1" in chosen else chosen  # devices after -1 are not visible
    return min(count, sum(map(bool, chosen)))


_loaded: list[Cuda] = []
_loading = threading.Lock()


def loaded() -> Cuda:
    """The library, which the first call loads. Must be called only when the framework already uses a GPU.

    Raises:
        OSError, CudaError: the library cannot be used; the message says why.
    """
    with _loading:
        if not _loaded:
            _loaded.append(Cuda.load(_FILE))
        return _loaded[0]
