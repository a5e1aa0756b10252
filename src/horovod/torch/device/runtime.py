"""Access to PyTorch's devices for engines that move device memory: streams, events, allocator and copies.

It uses the functions of ``torch.cuda``, which PyTorch also provides for ROCm, or the same functions in the module of another
kind of device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from horovod.comm.base import DeviceFailure
from horovod.comm.cuda import library, nvml
from horovod.comm.device import DeviceFacts, DeviceRuntime, OwnedSpans, names_in_view
from horovod.comm.spans import Spans, layout_of
from horovod.core.requests import devices
from horovod.torch.tensors import DATA_TYPES

_TORCH_TYPES = {data_type.numpy: dtype for dtype, data_type in DATA_TYPES.items()}
_INTEGERS = {1: (torch.uint8, "|u1"), 2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}
"""By element size in bytes, the integers as which copies treat elements: PyTorch's type and the type of the array interface."""
_HIGHEST = -1

_log = logging.getLogger("horovod.torch")

InMemory = Callable[[torch.device, int, int, int], torch.Tensor]
"""``in_memory(device, address, length, itemsize)``: a tensor of ``length`` integers of ``itemsize`` bytes at ``address``, which
does not keep the memory alive."""


class _CudaArray:
    """Memory of a CUDA device, described by the CUDA array interface."""

    def __init__(self, address: int, length: int, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@lru_cache(maxsize=8192)
def _in_cuda_memory(device: torch.device, address: int, length: int, itemsize: int) -> torch.Tensor:
    """The ``in_memory`` function of CUDA. It is cached, because gradients usually keep their addresses from step to step."""
    return torch.as_tensor(_CudaArray(address, length, _INTEGERS[itemsize][1]), device=device)


IN_MEMORY: dict[str, InMemory] = {"cuda": _in_cuda_memory}
"""The kinds of devices whose memory an engine can move, each with its ``in_memory`` function."""


class TorchRuntime(DeviceRuntime):
    """One device of PyTorch."""

    scales = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.device = str(device)
        self._module: Any = getattr(torch, device.type)
        self._beside_captures = beside_captures_on(device.type)

    def __repr__(self) -> str:
        return self.device

    @contextmanager
    def chosen(self) -> Iterator[None]:
        with self._module.device(self.torch_device), self._beside_captures():
            yield

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.torch_device, priority=_HIGHEST)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.torch_device)

    def stream_address(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait(self, stream: Any, marker: Any) -> None:
        stream.wait_event(marker)

    def query(self, marker: Any) -> bool:
        with self.chosen():
            return bool(marker.query())

    def memory_of(self, tensor: torch.Tensor) -> Any:
        """What keeps a tensor's memory. Keeps the interpreter lock, unlike ``detach()``: a group asks for each of its tensors,
        and another thread that gets the lock has it for milliseconds."""
        return tensor.untyped_storage()

    def record_stream(self, memory: Any, stream: Any) -> None:
        """Let memory, as of :meth:`memory_of`, be used again only after the work that a stream has been given until it is
        released."""
        torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(memory).record_stream(stream)

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        return bool(self._module.is_current_stream_capturing())

    def allocate(self, dtype: np.dtype[Any], length: int, stream: Any, value: Any = None) -> OwnedSpans:
        kind = _TORCH_TYPES[dtype]
        with self.on(stream):
            made = torch.empty(length, dtype=kind, device=self.torch_device)
            if value is not None:
                made.fill_(_plain(dtype, value))
        return OwnedSpans(layout_of(dtype, (length,), self.device), [made.data_ptr()], owner=made)

    def copy(self, stream: Any, sources: Spans, targets: Spans) -> None:
        layout = sources.layout
        itemsize = layout.dtype.itemsize
        pairs = [
            (source, target, length)
            for source, target, length in zip(sources.addresses, targets.addresses, layout.sizes, strict=True)
            if length and source != target
        ]
        if not pairs:
            return
        if itemsize not in _INTEGERS:  # complex128
            itemsize, pairs = 8, [(source, target, length * itemsize // 8) for source, target, length in pairs]
        at = IN_MEMORY[self.torch_device.type]
        with self.on(stream), torch.no_grad():
            torch._foreach_copy_(
                [at(self.torch_device, target, length, itemsize) for _, target, length in pairs],
                [at(self.torch_device, source, length, itemsize) for source, _, length in pairs],
                non_blocking=True,
            )

    def scale(self, stream: Any, sources: Spans, targets: Spans, factor: float) -> None:
        self.copy(stream, sources, targets)
        layout = targets.layout
        kind, at = _TORCH_TYPES[layout.dtype], IN_MEMORY[self.torch_device.type]
        with self.on(stream), torch.no_grad():
            for address, size in zip(targets.addresses, layout.sizes, strict=True):
                if size:  # one by one: _foreach_mul_ may round the factor to the vectors' type
                    at(self.torch_device, address, size, layout.dtype.itemsize).view(kind).mul_(factor)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """A context in which the stream is the thread's current one. Tensors made in it are no inference tensors."""
        with self.chosen(), self._module.stream(stream), torch.inference_mode(False):
            yield


def _plain(dtype: np.dtype[Any], value: Any) -> Any:
    """A NumPy scalar as a Python number."""
    return np.array(value, dtype).astype(np.float64).item() if dtype.kind == "V" else np.array(value, dtype).item()


class Devices:
    """The devices of this process, for the core. The first device that a generation uses carries out all its collectives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runtime: TorchRuntime | None = None

    def facts(self) -> DeviceFacts:
        gpus = tuple(name for kind in IN_MEMORY for name in _names(kind))
        missing = ""
        if not gpus:
            kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
            built = " and ".join(f"{kind} {version}" for kind, version in kinds.items() if version)
            missing = (
                f"PyTorch finds no GPU (it was built for {built}): nvidia-smi or rocm-smi shows whether the driver does, and "
                "CUDA_VISIBLE_DEVICES may hide it"
                if built
                else "this PyTorch was built without CUDA and ROCm: install one from pytorch.org that has it"
            )
        return DeviceFacts(gpus, missing)

    def runtime(self) -> TorchRuntime:
        return self.use(None)

    def use(self, device: torch.device | None) -> TorchRuntime:
        """The device of this rank's collectives. The first call in a generation chooses it: ``device``, or by default the
        thread's current one."""
        with self._lock:
            if self._runtime is None:
                if device is None:
                    kind = next((kind for kind in IN_MEMORY if _count(kind)), "cuda")
                    device = torch.device(kind, int(getattr(torch, kind).current_device()))
                self._runtime = TorchRuntime(device)
            return self._runtime

    def forget(self) -> None:
        """Called when a generation ends: the next one may use another device."""
        with self._lock:
            self._runtime = None


def beside_captures_on(kind: str) -> Callable[[], AbstractContextManager[None]]:
    """A function that makes contexts in which calls do not disturb graph captures on this kind of device. With HIP, which has
    no such mode, the contexts do nothing."""
    if kind != "cuda" or not torch.version.cuda:
        return nullcontext
    try:
        return library.loaded().beside_captures
    except (OSError, DeviceFailure) as error:
        _log.warning("captures of CUDA graphs may fail while collectives are under way: %s", error)
        return nullcontext


def _count(kind: str) -> int:
    module: Any = getattr(torch, kind)
    return int(module.device_count())


def _names(kind: str) -> list[str]:
    """Identifiers of the visible devices of a kind: their UUIDs if NVIDIA's library provides them. Uses no device memory."""
    count = _count(kind)
    known = nvml.visible_gpus() if kind == "cuda" and torch.version.cuda else None
    return known if known is not None and len(known) == count else names_in_view(kind, count)


torch_devices = Devices()
devices.provide(torch_devices)
