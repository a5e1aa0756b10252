"""Compressors of arrays. A compressor is a class with two static methods; scripts may pass their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._bindings.compression import CastCompressor, Compressor, Int4Compressor, Int8Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Casts float32 and float64 to float16. Gradients above 65504 overflow."""

    narrow = np.float16

    @staticmethod
    def can_cast(tensor: Any) -> bool:
        return np.dtype(tensor.dtype) in (np.float32, np.float64)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor if np.dtype(tensor.dtype) == dtype else tensor.astype(dtype)


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
