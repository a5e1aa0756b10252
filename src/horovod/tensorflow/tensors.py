"""Converts between TensorFlow's eager tensors and the core's :class:`~horovod.core.requests.tensor.Tensor`.

Nothing is copied. The core reads inputs in TensorFlow's memory, and TensorFlow takes over the memory of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod.comm.datatypes import Array, DataType
from horovod.core.requests.tensor import Tensor
from horovod.tensorflow.errors import UnsupportedType

DATA_TYPES: dict[tf.DType, DataType] = {tf.as_dtype(each.label): each for each in DataType}

_ALIGNMENT = 64
"""In bytes. TensorFlow takes over memory without a copy if its address is a multiple of this."""


def dimensions(tensor: Any) -> list[Any] | None:
    """The shape as a list, with None for dimensions that are not known yet. None if the number of dimensions is not known.

    The elements of ``tensor.shape`` are objects of type Dimension in scripts that call ``tf.compat.v1.disable_v2_behavior()``
    or ``disable_v2_tensorshape()``.
    """
    return None if tensor.shape.rank is None else list(tensor.shape.as_list())


def any_rows(tensor: Any) -> list[Any] | None:
    """:func:`dimensions` of a tensor like this one with any number of rows, for the shape of an output."""
    known = dimensions(tensor)
    return None if known is None else [None, *known[1:]]


def check_type(tensor: Any, what: str) -> None:
    """Check that a tensor's elements can be communicated. This also works while a graph is being built.

    Raises:
        UnsupportedType: they cannot be. Strings, quantised numbers and resources cannot.
    """
    if tensor.dtype not in DATA_TYPES:
        supported = ", ".join(sorted(data_type.label for data_type in DataType))
        raise UnsupportedType(
            f"{what}: elements of type {tensor.dtype.name} cannot be communicated; supported are {supported}"
        )


def view(tensor: Any) -> Tensor:
    """An eager tensor as a tensor of the core, which keeps the memory alive."""
    try:
        array = np.asarray(tensor)
    except ValueError:  # a bfloat16 without dimensions has no buffer
        array = np.asarray(tensor.numpy())
    return Tensor(array.reshape(-1), DATA_TYPES[tensor.dtype], array.shape)


class HostRoom:
    """Host memory for an output. The core writes ``vector``, then :meth:`tensor` makes it an eager tensor."""

    __slots__ = ("_dtype", "_shape", "vector")

    def __init__(self, shape: Sequence[int], dtype: tf.DType) -> None:
        element = DATA_TYPES[dtype].numpy
        size = element.itemsize
        for dimension in shape:
            size *= dimension
        memory: Array = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        self.vector: Array = memory[start : start + size].view(element)
        self._shape = tuple(shape)
        self._dtype = dtype

    def described(self) -> Tensor:
        """This memory as a tensor of the core."""
        return Tensor(self.vector, DATA_TYPES[self._dtype], self._shape)

    def tensor(self) -> Any:
        """An eager tensor in this memory. The array must not be written afterwards."""
        return tf.__internal__.EagerTensor(
            self.vector.reshape(self._shape), _host_memory(), self._dtype.as_datatype_enum
        )


_host = ""


def _host_memory() -> str:
    """TensorFlow's full name of the CPU device."""
    global _host
    if not _host:
        with tf.device("CPU:0"):
            _host = tf.constant(0).device
    return _host
