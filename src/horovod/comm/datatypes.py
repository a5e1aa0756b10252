"""The one table of element types: the number in messages, the NumPy type, the size, the printed name.

Numbers 0 to 9 are those of the interface that existing scripts rely on; bfloat16, the wider unsigned types and complex numbers
follow.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class DataType(IntEnum):
    """The element types of collectives. Every engine for host memory moves and reduces all of them
    (:func:`~horovod.comm.reduction.can_fold` says by which reductions).

    Attributes:
        label: the lower-case name used in messages, for example ``float32``.
        numpy: the NumPy type.
        itemsize: bytes of one element.
    """

    label: str
    numpy: np.dtype[Any]
    itemsize: int

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BOOL = 9
    BFLOAT16 = 10
    UINT32 = 11
    UINT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14

    def __init__(self, number: int) -> None:
        self.label = self.name.lower()
        self.numpy = np.dtype(ml_dtypes.bfloat16) if self.label == "bfloat16" else np.dtype(self.label)
        self.itemsize = self.numpy.itemsize


_FROM_NUMPY: dict[np.dtype[Any], DataType] = {data_type.numpy: data_type for data_type in DataType}

HALF_PRECISION = frozenset({DataType.FLOAT16, DataType.BFLOAT16})
FLOATING = frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64})
COMPLEX = frozenset({DataType.COMPLEX64, DataType.COMPLEX128})
"""Pairs of reals. Sums and averages are computed separately for the real and the imaginary parts."""


def data_type_of(array: Array) -> DataType:
    """The data type of a NumPy array.

    Raises:
        ValueError: no collective moves this type, for example strings, objects and structured types.
    """
    try:
        return _FROM_NUMPY[array.dtype]
    except KeyError:
        supported = ", ".join(data_type.label for data_type in DataType)
        raise ValueError(f"elements of type {array.dtype} cannot be communicated; supported are {supported}") from None
