"""Between TensorFlow's eager tensors and the core's :class:`~horovod.core.submission.tensor.Tensor`: views, room for
outputs, types.

Nothing is copied: inputs are read where TensorFlow has them, and outputs are made of memory that TensorFlow takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from horovod.comm.datatypes import Array, DataType
from horovod.core.submission.tensor import Tensor
from horovod.tensorflow.errors import UnsupportedType

DATA_TYPES: dict[tf.DType, DataType] = {
    tf.as_dtype(data_type.numpy): data_type for data_type in DataType if data_type.numpy != np.dtype(ml_dtypes.bfloat16)
}
DATA_TYPES[tf.bfloat16] = DataType.BFLOAT16

_ALIGNMENT = 64
"""Bytes. TensorFlow takes memory over without a copy if it begins at a multiple of this."""


def dimensions(tensor: Any) -> list[Any] | None:
    """The shape as numbers, None for what is not known yet; None if not even the rank is.

    The elements of ``tensor.shape`` are objects of type Dimension in scripts that call ``tf.compat.v1.disable_v2_behavior()``
    or ``disable_v2_tensorshape()``.
    """
    return None if tensor.shape.rank is None else list(tensor.shape.as_list())


def any_rows(tensor: Any) -> list[Any] | None:
    """:func:`dimensions` of a tensor like this one with any number of rows, for the shape of an output."""
    known = dimensions(tensor)
    return None if known is None else [None, *known[1:]]


def check_type(tensor: Any, what: str) -> None:
    """See that a tensor's elements can be communicated; in a graph too, while it is being built.

    Raises:
        UnsupportedType: they cannot: strings, quantised numbers, resources.
    """
    if tensor.dtype not in DATA_TYPES:
        supported = ", ".join(sorted(data_type.label for data_type in DataType))
        raise UnsupportedType(
            f"{what}: elements of type {tensor.dtype.name} cannot be communicated; supported are {supported}"
        )


def view(tensor: Any) -> Tensor:
    """What the core needs to know of an eager tensor; the view keeps its memory alive."""
    try:
        array = np.asarray(tensor)
    except ValueError:  # a bfloat16 without dimensions, which NumPy gets as an object of its own
        array = np.asarray(tensor.numpy())
    return Tensor(array.reshape(-1), DATA_TYPES[tensor.dtype], array.shape)


class Room:
    """Memory for an output: the core fills ``array``, then :meth:`tensor` makes an eager tensor of it."""

    __slots__ = ("_dtype", "_shape", "array")

    def __init__(self, shape: Sequence[int], dtype: tf.DType) -> None:
        element = DATA_TYPES[dtype].numpy
        size = element.itemsize
        for dimension in shape:
            size *= dimension
        memory: Array = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        self.array: Array = memory[start : start + size].view(element)
        self._shape = tuple(shape)
        self._dtype = dtype

    def described(self) -> Tensor:
        """This memory as the core has it."""
        return Tensor(self.array, DATA_TYPES[self._dtype], self._shape)

    def tensor(self) -> Any:
        """An eager tensor of it, in host memory. The array must not be written afterwards."""
        return tf.__internal__.EagerTensor(
            self.array.reshape(self._shape), _host_memory(), self._dtype.as_datatype_enum
        )


_host = ""


def _host_memory() -> str:
    """TensorFlow's full name of the device that host memory belongs to."""
    global _host
    if not _host:
        with tf.device("CPU:0"):
            _host = tf.constant(0).device
    return _host
