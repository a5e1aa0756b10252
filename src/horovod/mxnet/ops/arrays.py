"""NDArrays as the core sees them: one table of types, one check, their memory, and room for results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.ndarray.ndarray import _new_alloc_handle

from horovod.comm.datatypes import Array, DataType
from horovod.core.submission.tensor import Tensor

DATA_TYPES: dict[type, DataType] = {
    np.float32: DataType.FLOAT32,
    np.float64: DataType.FLOAT64,
    np.float16: DataType.FLOAT16,
    np.uint8: DataType.UINT8,
    np.int8: DataType.INT8,
    np.int32: DataType.INT32,
    np.int64: DataType.INT64,
}

_HOST_CONTEXTS = {"cpu", "cpu_pinned", "cpu_shared"}


def check(array: Any, name: str) -> DataType:
    """The array's data type, if it can be communicated.

    Raises:
        ValueError: no NDArray, sparse, or of an unsupported type.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise ValueError(f"{name}: expected an mxnet.nd.NDArray, not {type(array).__name__}")
    if array.stype != "default":
        raise ValueError(
            f"{name}: sparse arrays ({array.stype}) cannot be communicated; call .tostype('default') on it first, or "
            "make the layer with sparse_grad=False"
        )
    data_type = DATA_TYPES.get(np.dtype(array.dtype).type)
    if data_type is None:
        supported = ", ".join(each.label for each in DATA_TYPES.values())
        raise ValueError(
            f"{name}: elements of type {np.dtype(array.dtype).name} cannot be communicated; supported are {supported}"
        )
    return data_type


def is_host(array: Any) -> bool:
    """Whether an array lies in host memory."""
    return array.context.device_type in _HOST_CONTEXTS


def on_host(arrays: Sequence[Any]) -> list[Any]:
    """The arrays in host memory: those that are there, and copies of the others, which the engine makes."""
    return [array if is_host(array) else array.copyto(mx.cpu()) for array in arrays]


def variable(array: Any) -> int:
    """What identifies an array's engine variable: arrays that are views of one another have the same.

    It is the address of ``mxnet::NDArray::Chunk``, their memory, to which an ``NDArray``'s first member points.
    """
    return ctypes.c_void_p.from_address(array.handle.value).value or 0


# oneDNN's operators leave arrays in layouts of their own: results of convolutions, and in inference their weights. The C API
# undoes that only where it may wait for the engine, which an operation of the engine must not. So what it calls is called.
_NDARRAY_BYTES = 1024  # more than it has
_exported: Any = _LIB
try:
    _new = ctypes.CDLL("libstdc++.so.6")["_Znwm"]  # operator new(unsigned long)
    _new.argtypes, _new.restype = [ctypes.c_size_t], ctypes.c_void_p
    _copy_to_default = _exported["_ZNK5mxnet7NDArray15Reorder2DefaultEv"]  # NDArray NDArray::Reorder2Default() const
    _copy_to_default.argtypes, _copy_to_default.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p
    _change_to_default = _exported[
        "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv"
    ]  # void NDArray::Chunk::Reorder2Default()
    _change_to_default.argtypes, _change_to_default.restype = [ctypes.c_void_p], None
except AttributeError:  # a build without oneDNN has one layout alone
    _copy_to_default = _change_to_default = None


def readable(array: Any) -> Any:
    """The array in the layout of its shape: another one of the same memory, or a copy if that has another layout.

    Called within an operation of the engine that reads it.
    """
    if _copy_to_default is None:
        return array
    made = _new(_NDARRAY_BYTES)
    _copy_to_default(made, array.handle)  # a function that returns an object gets the address for it first
    return mx.nd.NDArray(NDArrayHandle(made))  # which deletes it


def writable(array: Any) -> Any:
    """The array itself, changed to the layout of its shape. Called within an operation of the engine that writes it."""
    if _change_to_default is not None:
        _change_to_default(variable(array))
    return array


def flat(array: Any) -> Array:
    """The elements of an array that is :func:`readable` or :func:`writable`, or new, as a one-dimensional NumPy array.

    Nothing is copied, and the memory is not held.
    """
    dtype = np.dtype(array.dtype)
    if not array.size:
        return np.empty(0, dtype)
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address.value or 0)
    return np.frombuffer(memory, dtype)


def view(array: Any) -> Tensor:
    """An array for the core. As :func:`flat`; raises as :func:`check`."""
    return Tensor(flat(array), check(array, "view"), tuple(array.shape))


def empty(shape: Sequence[int], like: Any) -> Any:
    """A new array in host memory, of the kind and type of ``like``; callable on any thread."""
    kind = mx.np.ndarray if isinstance(like, mx.np.ndarray) else mx.nd.NDArray
    return kind(_new_alloc_handle(tuple(shape), mx.cpu(), False, np.dtype(like.dtype)))


def rooms(like: Sequence[Any], outputs: dict[int, Any]) -> Callable[[int, int], Array]:
    """Makes outputs with the columns and types of ``like`` when their rows are known; puts them in ``outputs``."""

    def allocate(index: int, rows: int) -> Array:
        outputs[index] = empty((rows, *like[index].shape[1:]), like[index])
        return flat(outputs[index])

    return allocate


def back(results: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Results in host memory, where the tensors that they were made from are."""
    return [
        result if is_host(each) else result.as_in_context(each.context)
        for result, each in zip(results, like, strict=True)
    ]
