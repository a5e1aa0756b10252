"""The UUIDs of a host's GPUs, from NVIDIA's management library (NVML), which makes no context on any GPU.

Frameworks number the GPUs that a process may use from 0. If a batch system shows each process one GPU, every process calls it
number 0, so only UUIDs show whether two ranks share a GPU.
"""

from __future__ import annotations

import ctypes
import os

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
    # nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
    "nvmlDeviceGetUUID": [_address, ctypes.c_char_p, _unsigned],
}


def _identities() -> list[str] | None:
    """The UUIDs of the GPUs that this process is permitted to use, in NVML's order; None if NVML cannot report them."""
    try:
        library = ctypes.CDLL(_FILE)
        functions = {name: getattr(library, name) for name in _PROTOTYPES}
    except (OSError, AttributeError):
        return None
    for name, function in functions.items():
        function.restype, function.argtypes = _int, _PROTOTYPES[name]
    if functions["nvmlInit_v2"]() != _SUCCESS:
        return None
    try:
        count = _unsigned()
        if functions["nvmlDeviceGetCount_v2"](ctypes.byref(count)) != _SUCCESS:
            return None
        found = []
        for index in range(count.value):
            device, text = _address(), ctypes.create_string_buffer(_UUID_BYTES)
            result = functions["nvmlDeviceGetHandleByIndex_v2"](index, ctypes.byref(device))
            if result == _INSUFFICIENT_PERMISSIONS:  # a control group hides this GPU from the process
                continue
            if result != _SUCCESS or functions["nvmlDeviceGetUUID"](device, text, len(text)) != _SUCCESS:
                return None
            found.append(text.value.decode())
        return found
    finally:
        functions["nvmlShutdown"]()


def visible_gpus() -> list[str] | None:
    """The UUIDs of the GPUs that this process may use, in the order in which CUDA numbers them: those that the system permits,
    restricted by CUDA_VISIBLE_DEVICES. None if they are not known.
    """
    present = _identities()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present is None or chosen is None:
        return present
    return selected_gpus(present, chosen)


def selected_gpus(present: list[str], chosen: str) -> list[str]:
    """The GPUs of ``present`` that a value of CUDA_VISIBLE_DEVICES selects by numbers or prefixes of UUIDs.

    CUDA ignores the first entry that names no device, or a device for the second time, and all entries after it. The name of a
    part of a GPU (``MIG-...``) is taken as its UUID.

    Args:
        present: the UUIDs of all GPUs, in the order of their numbers.
        chosen: the value of CUDA_VISIBLE_DEVICES.
    """
    found: list[str] = []
    for entry in map(str.strip, chosen.split(",")):
        if entry.isdecimal():
            matches = present[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            matches = [entry]
        else:
            matches = [each for each in present if entry and each.startswith(entry)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found
