"""The one table of element types: the identifier that travels, its NumPy type, its size, its printed name.

Ids 0 to 9 are those of the interface that existing scripts rely on; bfloat16, the wider unsigned types and complex numbers
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
    """Element types that every engine moves and reduces."""

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

    @property
    def label(self) -> str:
        """The lower-case name used in messages, for example ``float32``."""
        return self.name.lower()

    @property
    def numpy(self) -> np.dtype[Any]:
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _NUMPY[self].itemsize


_NUMPY: dict[DataType, np.dtype[Any]] = {
    data_type: np.dtype(ml_dtypes.bfloat16) if data_type is DataType.BFLOAT16 else np.dtype(data_type.name.lower())
    for data_type in DataType
}
_FROM_NUMPY: dict[np.dtype[Any], DataType] = {numpy_type: data_type for data_type, numpy_type in _NUMPY.items()}

HALF_PRECISION = frozenset({DataType.FLOAT16, DataType.BFLOAT16})
FLOATING = frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64})
COMPLEX = frozenset({DataType.COMPLEX64, DataType.COMPLEX128})
"""Pairs of reals. A sum, and so an average, is that of the real and of the imaginary parts."""


def data_type_of(array: Array) -> DataType:
    """The data type of a NumPy array.

    Raises:
        ValueError: no collective moves this type (strings, objects, structured types).
    """
    try:
        return _FROM_NUMPY[array.dtype]
    except KeyError:
        supported = ", ".join(data_type.label for data_type in DataType)
        raise ValueError(f"elements of type {array.dtype} cannot be communicated; supported are {supported}") from None
