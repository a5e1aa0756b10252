"""Converts between NDArrays and the core's tensors: types, checks, memory, and new arrays for results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.ndarray.ndarray import _new_alloc_handle

from horovod.comm.datatypes import Array, DataType
from horovod.core.requests.tensor import Tensor

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
    """The data type of an array, which is checked.

    Raises:
        ValueError: ``array`` is not an NDArray, or it is sparse or of an unsupported type.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise ValueError(f"{name}: expected an mxnet.nd.NDArray, not {type(array).__name__}")
    if array.stype != "default":
        raise ValueError(
            f"{name}: sparse arrays ({array.stype}) cannot be communicated; call .tostype('default') on the array first, or "
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
    """Whether an array is in host memory."""
    return array.context.device_type in _HOST_CONTEXTS


def on_host(arrays: Sequence[Any]) -> list[Any]:
    """The arrays in host memory. The engine copies those that are on other devices."""
    return [array if is_host(array) else array.copyto(mx.cpu()) for array in arrays]


def variable(array: Any) -> int:
    """The key of an array's engine variable. Arrays that are views of the same memory have the same key.

    It is the address of the array's memory, ``mxnet::NDArray::Chunk``, to which the first member of an ``NDArray`` points.
    """
    return ctypes.c_void_p.from_address(array.handle.value).value or 0


# oneDNN's operators store some arrays in other layouts: results of convolutions, and in inference their weights. The function
# of the C API that restores the default layout waits for the engine, which an operation of the engine must not do. So this
# module calls the C++ functions that the function of the C API uses.
_NDARRAY_BYTES = 1024  # more than the size of an NDArray
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
except AttributeError:  # a build without oneDNN has only one layout
    _copy_to_default = _change_to_default = None


def readable(array: Any) -> Any:
    """The array in the default layout: a new NDArray of the same memory, or a copy if the memory has another layout.

    Call this only inside an engine operation that reads the array.
    """
    if _copy_to_default is None:
        return array
    made = _new(_NDARRAY_BYTES)
    _copy_to_default(made, array.handle)  # in C++, the address of a returned object is the first argument
    return mx.nd.NDArray(NDArrayHandle(made))  # the NDArray deletes it


def writable(array: Any) -> Any:
    """Change the array to the default layout, and return it. Call this only inside an engine operation that writes to it."""
    if _change_to_default is not None:
        _change_to_default(variable(array))
    return array


def flat(array: Any) -> Array:
    """The elements of an array as a one-dimensional NumPy array. The array must be new, or :func:`readable` or
    :func:`writable`.

    Nothing is copied, and the result does not keep the memory alive.
    """
    dtype = np.dtype(array.dtype)
    if not array.size:
        return np.empty(0, dtype)
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address.value or 0)
    return np.frombuffer(memory, dtype)


def view(array: Any) -> Tensor:
    """An array as a tensor of the core. :func:`flat` says which arrays it takes. Raises as :func:`check`."""
    return Tensor(flat(array), check(array, "view"), tuple(array.shape))


def empty(shape: Sequence[int], like: Any) -> Any:
    """A new array in host memory, of the class and type of ``like``. Any thread may call it."""
    kind = mx.np.ndarray if isinstance(like, mx.np.ndarray) else mx.nd.NDArray
    return kind(_new_alloc_handle(tuple(shape), mx.cpu(), False, np.dtype(like.dtype)))


def allocator(like: Sequence[Any], outputs: dict[int, Any]) -> Callable[[int, int], Array]:
    """A function that makes an output when its number of rows is known, and stores it in ``outputs``.

    Args:
        like: for each output, an array of its type whose dimensions other than the first are those of the output.
        outputs: gets the outputs, by index.
    """

    def allocate(index: int, rows: int) -> Array:
        outputs[index] = empty((rows, *like[index].shape[1:]), like[index])
        return flat(outputs[index])

    return allocate


def to_devices_of(results: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Copy results from host memory to the devices of ``like``."""
    return [
        result if is_host(each) else result.as_in_context(each.context)
        for result, each in zip(results, like, strict=True)
    ]
