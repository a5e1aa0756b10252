"""Casts to 16 bits: floating-point tensors travel narrow and come back as they were, others are not touched."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.common.casting import CastCompressor


class _Half(CastCompressor):
    narrow = np.float16

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(np.issubdtype(tensor.dtype, np.floating))

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


def test_floating_point_tensors_travel_narrow_and_come_back_in_their_type() -> None:
    narrow, context = _Half.compress(np.array([1.5, -2.0], np.float64))
    assert narrow.dtype == np.float16
    restored = _Half.decompress(narrow, context)
    assert restored.dtype == np.float64
    np.testing.assert_array_equal(restored, [1.5, -2.0])


def test_integers_travel_unchanged() -> None:
    numbers = np.array([1 << 40])
    travelling, context = _Half.compress(numbers)
    assert travelling is numbers
    assert _Half.decompress(travelling, context).dtype == numbers.dtype
