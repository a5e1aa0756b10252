"""CUDA's driver library on host memory: streams that run late, and of which every misuse is told.

:class:`RecordedCuda` has the functions that :mod:`horovod.comm.cuda.library` names. Its streams are those of
:mod:`recorded_nccl`, whose NCCL puts its work on them: each does its work in order, on a thread of its own, late. So whoever
forgets to wait gets wrong numbers. Memory that was freed while a stream still had work with it is a breach.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod.comm.cuda import library, nvml
from horovod.comm.datatypes import Array
from horovod.comm.spans import address_of
from recorded_nccl import Marker, RecordedNccl, Stream, _await, array_at, loaded

SUCCESS, INVALID_VALUE = 0, 1
CONTEXTS = 1000
NONSENSE = 77


class RecordedCuda:
    """Plays the loaded library.

    Attributes:
        calls: names of all calls, in order.
        breaches: of the protocol.
        device: that must be the current one in calls.
        memory_device: the device on which all addresses lie; the same unless a test changes it.
        memory, events: that there are, by address.
        retained: contexts.
    """

    def __init__(self, device: int = 0) -> None:
        self.calls: list[str] = []
        self.breaches: list[str] = []
        self.streams: dict[int, Stream] = {}
        self.device = self.memory_device = device
        self.retained = 0
        self._thread = threading.local()
        self.events: dict[int, Marker] = {}
        self._numbers = itertools.count(1)
        self.memory: dict[int, Array] = {}
        self._uses: Counter[int] = Counter()
        self._lock = threading.Lock()

    def stream(self, name: str = "theirs") -> Stream:
        """A stream of the framework's own."""
        return Stream(self.streams, len(name))

    def synchronize(self, address: int) -> None:
        """Return when a stream has done all its work."""
        marker = Marker()
        self.streams[address].push(marker.reached.set)
        _await(marker)

    def touched(self, stream: Stream, address: int) -> Callable[[], None]:
        """As :class:`recorded_nccl.RecordedNccl` wants it: work on a stream uses memory."""
        base = self._base(address)
        if base is None:
            return lambda: None
        with self._lock:
            self._uses[base] += 1
        return lambda: self._uses.subtract([base])

    def _base(self, address: int) -> int | None:
        with self._lock:
            return next((b for b, made in self.memory.items() if b <= address < b + max(made.nbytes, 1)), None)

    # The library's functions

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = b"invalid argument"
        return SUCCESS

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return SUCCESS

    def cuDevicePrimaryCtxRetain(self, made: Any, device: Any) -> int:
        made._obj.value = CONTEXTS + device.value
        self.retained += 1
        return SUCCESS

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.retained -= 1
        return SUCCESS

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.current().append(context - CONTEXTS)
        return SUCCESS

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current().pop()
        return SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self._thread.mode, mode._obj.value = mode._obj.value, getattr(self._thread, "mode", 0)
        return SUCCESS

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: int) -> int:
        assert attribute == library.DEVICE_ORDINAL
        found._obj.value = self.memory_device
        return SUCCESS

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        self._on_device("cuCtxGetStreamPriorityRange")
        least._obj.value, greatest._obj.value = 0, -5
        return SUCCESS

    def cuStreamCreateWithPriority(self, made: Any, flags: int, priority: int) -> int:
        if flags != library.NON_BLOCKING or priority != -5:
            self.breaches.append("the stream waits for the default stream, or has no priority")
        self._on_device("cuStreamCreateWithPriority")
        made._obj.value = Stream(self.streams, next(self._numbers)).address
        return SUCCESS

    def cuStreamDestroy_v2(self, stream: int) -> int:
        return SUCCESS if self.streams.pop(stream, None) is not None else INVALID_VALUE

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        marker = self.events[event]
        self._called("cuStreamWaitEvent", stream).push(lambda: _await(marker))
        return SUCCESS

    def cuEventCreate(self, made: Any, flags: int) -> int:
        self._on_device("cuEventCreate")
        made._obj.value = next(self._numbers)
        return SUCCESS

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.events[event] = marker = Marker()
        self._called("cuEventRecord", stream).push(marker.reached.set)
        return SUCCESS

    def cuEventQuery(self, event: int) -> int:
        self._on_device("cuEventQuery")
        return SUCCESS if self.events[event].reached.is_set() else library.NOT_READY

    def cuEventSynchronize(self, event: int) -> int:
        self.calls.append("cuEventSynchronize")
        _await(self.events[event])
        return SUCCESS

    def cuEventDestroy_v2(self, event: int) -> int:
        return SUCCESS if self.events.pop(event, None) is not None else INVALID_VALUE

    def cuMemAllocAsync(self, made: Any, nbytes: int, stream: int) -> int:
        self._called("cuMemAllocAsync", stream)
        memory = np.full(nbytes, NONSENSE, np.uint8)
        made._obj.value = address_of(memory)
        with self._lock:
            self.memory[address_of(memory)] = memory
        return SUCCESS

    def cuMemFreeAsync(self, address: int, stream: int) -> int:
        def free() -> None:
            with self._lock:
                if self._uses[address]:
                    self.breaches.append("memory was freed while a stream works on it")
                self.memory.pop(address)[:] = NONSENSE

        self._called("cuMemFreeAsync", stream).push(free)
        return SUCCESS

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> int:
        self._called("cuMemsetD8Async", stream).push(lambda: array_at(address, count, np.uint8).fill(value))
        return SUCCESS

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, count: int, stream: int) -> int:
        def copy() -> None:
            array_at(target, count, np.uint8)[:] = array_at(source, count, np.uint8)

        self._called("cuMemcpyAsync", stream).push(copy)
        return SUCCESS

    cuMemcpyDtoDAsync_v2 = cuMemcpyHtoDAsync_v2

    def _called(self, name: str, stream: int) -> Stream:
        self.calls.append(name)
        self._on_device(name)
        return self.streams[stream]

    def current(self) -> list[int]:
        """The devices that the calling thread has chosen, the current one last."""
        if not hasattr(self._thread, "devices"):
            self._thread.devices = []
        devices: list[int] = self._thread.devices
        return devices

    def _on_device(self, name: str) -> None:
        if self.current()[-1:] != [self.device]:
            self.breaches.append(f"{name} while another device, or none, is the current one")


@contextmanager
def with_nccl(gpus: int = 2, device: int = 0) -> Iterator[tuple[RecordedCuda, RecordedNccl]]:
    """A block in which this process finds ``gpus`` GPUs with CUDA and NCCL, both recorded. It begins before ``init()``."""
    cuda = RecordedCuda(device)
    nccl = RecordedNccl(cuda.streams.__getitem__, cuda.touched)
    before = library.present, library.loaded, library.visible
    found = library.Cuda(cuda)
    library.present = lambda: True
    library.loaded = lambda: found
    library.visible = lambda: gpus
    known, nvml.visible_gpus = nvml.visible_gpus, lambda: [f"GPU-{number}" for number in range(gpus)]
    try:
        with loaded(nccl):
            yield cuda, nccl
    finally:
        library.present, library.loaded, library.visible = before
        nvml.visible_gpus = known
