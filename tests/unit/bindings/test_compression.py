"""Casting compressors: floating-point tensors travel in the narrow type and come back in their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod._bindings.compression import CastCompressor, Compressor


class Half(CastCompressor):
    narrow = np.float16

    @staticmethod
    def can_cast(tensor: Any) -> bool:
        return bool(np.issubdtype(tensor.dtype, np.floating))

    @staticmethod
    def cast(tensor: Any, data_type: Any) -> Any:
        return tensor.astype(data_type)


@pytest.mark.parametrize("data_type", [np.float32, np.float64, np.float16])
def test_floats_travel_narrow_and_return_in_their_own_type(data_type: Any) -> None:
    travelling, context = Half.compress(np.array([1.5, -2.0], data_type))
    assert travelling.dtype == np.float16
    restored = Half.decompress(travelling, context)
    assert restored.dtype == data_type
    assert restored.tolist() == [1.5, -2.0]


def test_other_types_stay_as_they_are() -> None:
    tensor = np.array([1 << 40, 3])
    travelling, context = Half.compress(tensor)
    assert travelling is tensor
    assert Half.decompress(travelling, context).tolist() == [1 << 40, 3]


def test_an_unfinished_compressor_says_what_it_must_define() -> None:
    with pytest.raises(NotImplementedError, match="compress"):
        Compressor.compress(np.zeros(1))
    with pytest.raises(NotImplementedError, match="decompress"):
        Compressor.decompress(np.zeros(1), None)
