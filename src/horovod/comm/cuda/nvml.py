"""The UUIDs of a host's GPUs, from NVIDIA's management library (NVML), which makes no context on any GPU.

Frameworks number the GPUs that a process may use from 0. If a batch system shows each process one GPU, every process calls it
number 0, so only UUIDs show whether two ranks share a GPU. A slice of a GPU (MIG) counts as the GPU: NCCL takes two slices of
one GPU for the same device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FILE = "libnvidia-ml.so.1"
_SUCCESS, _INSUFFICIENT_PERMISSIONS = 0, 4
_UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE"""

_int, _unsigned, _address = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p

_PROTOTYPES = {
    # nvmlReturn_t nvmlInit_v2(void), nvmlShutdown(void)
    "nvmlInit_v2": [],
    "nvmlShutdown": [],
    # nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
    "nvmlDeviceGetCount_v2": [ctypes.POINTER(_unsigned)],
    # nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
    "nvmlDeviceGetHandleByIndex_v2": [_unsigned, ctypes.POINTER(_address)],
    # nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
    "nvmlDeviceGetHandleByUUID": [ctypes.c_char_p, ctypes.POINTER(_address)],
    # nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t migDevice, nvmlDevice_t *device)
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": [_address, ctypes.POINTER(_address)],
    # nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
    "nvmlDeviceGetUUID": [_address, ctypes.c_char_p, _unsigned],
}


class _Nvml:
    """The library while it is initialised."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_FILE)
        self._functions = {name: getattr(library, name) for name in _PROTOTYPES}
        for name, function in self._functions.items():
            function.restype, function.argtypes = _int, _PROTOTYPES[name]

    def call(self, name: str, *arguments: object) -> int:
        return int(self._functions[name](*arguments))

    def present(self) -> list[str] | None:
        """The UUIDs of the GPUs that this process is permitted to use, in NVML's order; None if NVML cannot report them."""
        count = _unsigned()
        if self.call("nvmlDeviceGetCount_v2", ctypes.byref(count)) != _SUCCESS:
            return None
        found = []
        for index in range(count.value):
            device = _address()
            result = self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
            if result == _INSUFFICIENT_PERMISSIONS:  # a control group hides this GPU from the process
                continue
            identity = self._identity(device) if result == _SUCCESS else None
            if identity is None:
                return None
            found.append(identity)
        return found

    def gpu_of(self, name: str) -> str:
        """The UUID of the GPU of which ``name`` is a slice. If NVML does not know it, all slices count as one GPU's."""
        if name.startswith("MIG-GPU-"):  # as drivers before 470 name them: MIG-GPU-UUID/instance/instance
            return name.removeprefix("MIG-").split("/")[0]
        part, device = _address(), _address()
        known = (
            self.call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(part)) == _SUCCESS
            and self.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part, ctypes.byref(device)) == _SUCCESS
        )
        return (self._identity(device) if known else None) or "MIG"

    def _identity(self, device: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(_UUID_BYTES)
        return text.value.decode() if self.call("nvmlDeviceGetUUID", device, text, len(text)) == _SUCCESS else None


@contextmanager
def _initialised() -> Iterator[_Nvml | None]:
    """A block with the library, or None if it cannot be used."""
    try:
        nvml = _Nvml()
    except (OSError, AttributeError):
        yield None
        return
    if nvml.call("nvmlInit_v2") != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")


def visible_gpus() -> list[str] | None:
    """The UUIDs of the GPUs that this process may use, in the order in which CUDA numbers them: those that the system permits,
    restricted by CUDA_VISIBLE_DEVICES. A slice of a GPU is named by that GPU. None if they are not known.
    """
    with _initialised() as nvml:
        present = None if nvml is None else nvml.present()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if nvml is None or present is None or chosen is None:
            return present
        return selected_gpus(present, chosen, nvml.gpu_of)


def selected_gpus(present: list[str], chosen: str, gpu_of: Callable[[str], str]) -> list[str]:
    """The GPUs of ``present`` that a value of CUDA_VISIBLE_DEVICES selects by numbers or prefixes of UUIDs.

    CUDA ignores the first entry that names no device, or a device for the second time, and all entries after it. Of slices
    (``MIG-...``) it uses one.

    Args:
        present: the UUIDs of all GPUs, in the order of their numbers.
        chosen: the value of CUDA_VISIBLE_DEVICES.
        gpu_of: the UUID of the GPU to which a slice belongs.
    """
    found: list[str] = []
    for entry in map(str.strip, chosen.split(",")):
        if entry.startswith("MIG-"):
            return found or [gpu_of(entry)]
        if entry.isdecimal():
            matches = present[int(entry) : int(entry) + 1]
        else:
            matches = [each for each in present if entry and each.startswith(entry)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found
