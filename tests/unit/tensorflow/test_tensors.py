"""Tensors cross without copies, of every type, and outputs keep what was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from horovod.tensorflow.errors import UnsupportedType  # noqa: E402  TensorFlow may be missing
from horovod.tensorflow.tensors import DATA_TYPES, HostRoom, check_type, view  # noqa: E402

SHAPES: list[tuple[int, ...]] = [(), (0,), (2, 0, 3), (5,), (3, 4)]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(DATA_TYPES), ids=lambda dtype: str(dtype.name))
def test_every_type_and_shape_survives_the_conversion(dtype: Any, shape: tuple[int, ...]) -> None:
    source = tf.cast(tf.fill(shape, 1), dtype)
    seen = view(source)
    assert seen.shape == shape and seen.data_type is DATA_TYPES[dtype] and seen.array.ndim == 1
    assert seen.array.dtype == seen.data_type.numpy and np.all(seen.array == 1)
    room = HostRoom(shape, dtype)
    assert room.described().shape == shape and room.described().array is room.vector
    np.copyto(room.vector, seen.array)
    made = room.tensor()
    assert made.dtype == dtype and made.shape == shape
    assert np.all(tf.cast(made, tf.int32).numpy() == 1)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.bool])
def test_nothing_is_copied(dtype: Any) -> None:
    source = tf.cast(tf.ones([1000]), dtype)
    assert address(view(source).array) == address(np.asarray(source))
    room = HostRoom((1000,), dtype)
    assert address(room.vector) % 64 == 0
    assert address(np.asarray(room.tensor())) == address(room.vector)


def test_a_view_outlives_its_tensor() -> None:
    array = view(tf.fill([1 << 16], 7.0)).array
    others = [tf.fill([1 << 16], float(number)) for number in range(20)]
    assert np.all(array == 7.0) and len(others) == 20


def test_types_that_cannot_be_communicated_are_refused() -> None:
    for wrong in (tf.constant("text"), tf.cast(1, tf.qint8)):
        with pytest.raises(UnsupportedType, match="cannot be communicated; supported are bfloat16, bool") as found:
            check_type(wrong, "HorovodAllreduce")
        assert isinstance(found.value, TypeError) and isinstance(found.value, tf.errors.InvalidArgumentError)
