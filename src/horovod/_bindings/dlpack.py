"""DLPack: finds the address of a tensor's elements.

A framework returns a capsule around a ``DLManagedTensor``. It is only read here and never consumed, so it releases its
reference when it is deleted, and the user of the address must keep the tensor alive.
"""

from __future__ import annotations

import ctypes
from typing import Any


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of ``dlpack.h``, the first member of ``DLManagedTensor``: the same in all versions before 1.0."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer_of.restype = ctypes.c_void_p


def address_in(capsule: Any) -> int:
    """The address of the first element that a capsule named ``dltensor`` describes; 0 if there are no elements.

    The elements of TensorFlow's tensors and of JAX's buffers follow one another in the order of their indices.

    Raises:
        ValueError: it is another capsule, or was consumed.
    """
    tensor = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    if any(tensor.shape[axis] == 0 for axis in range(tensor.ndim)):
        return 0
    return int(tensor.data or 0) + int(tensor.byte_offset)
