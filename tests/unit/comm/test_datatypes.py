from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from horovod.comm.datatypes import COMPLEX, FLOATING, HALF_PRECISION, DataType, data_type_of

IDS = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bool": 9,
    "bfloat16": 10,
    "uint32": 11,
    "uint64": 12,
    "complex64": 13,
    "complex128": 14,
}
"""The public interface fixes 0 to 9; the others are fixed here, for they travel between ranks."""


def test_ids_and_labels() -> None:
    assert {data_type.label: int(data_type) for data_type in DataType} == IDS


@pytest.mark.parametrize("data_type", DataType)
def test_there_and_back(data_type: DataType) -> None:
    array = np.zeros(3, data_type.numpy)
    assert data_type_of(array) is data_type
    assert data_type.itemsize == array.itemsize
    assert str(data_type.numpy) == data_type.label


def test_families() -> None:
    assert {DataType.FLOAT16, DataType.BFLOAT16} == HALF_PRECISION
    assert HALF_PRECISION < FLOATING
    assert {DataType.COMPLEX64, DataType.COMPLEX128} == COMPLEX
    assert data_type_of(np.zeros(1, ml_dtypes.bfloat16)) in HALF_PRECISION


@pytest.mark.parametrize("dtype", [np.clongdouble, "U3", object, "M8[s]", [("x", np.float32)], ml_dtypes.float8_e4m3fn])
def test_what_cannot_be_communicated(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"cannot be communicated; supported are uint8, .*complex128"):
        data_type_of(np.empty(1, dtype))


def test_foreign_byte_order_is_refused() -> None:
    """Its bytes would be read as other numbers."""
    with pytest.raises(ValueError, match="cannot be communicated"):
        data_type_of(np.zeros(1, np.dtype(np.int32).newbyteorder()))
