"""NDArrays as the core sees them: one table of types, one check, their memory, and room for results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.ndarray.ndarray import _new_alloc_handle

from horovod.comm.datatypes import Array, DataType
from horovod.core.tensor import Tensor

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


def flat(array: Any) -> Array:
    """The elements as a one-dimensional NumPy array. Nothing is copied, and the memory is not held.

    For an array in host memory in its default layout, that nobody writes meanwhile: within an operation of the engine, or after
    ``wait_to_read()``.
    """
    dtype = np.dtype(array.dtype)
    if not array.size:
        return np.empty(0, dtype)
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address.value or 0)
    return np.frombuffer(memory, dtype)


def readable(array: Any, name: str) -> Tensor:
    """The elements of an array in host memory for the core, when everything that writes them is done.

    Raises:
        ValueError: as :func:`check`.
        MXNetError: what was to write them has failed.
    """
    data_type = check(array, name)
    array.wait_to_read()
    return Tensor(flat(array), data_type, tuple(array.shape))


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
