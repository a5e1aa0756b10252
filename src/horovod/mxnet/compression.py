"""How arrays are made smaller for the way, and restored afterwards. A compressor is two static methods; write your own."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Casts float32 and float64 to float16; other arrays stay. Gradients above 65504 overflow."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        dtype = np.dtype(tensor.dtype)
        return (tensor.astype("float16") if dtype in (np.float32, np.float64) else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if np.dtype(tensor.dtype) == ctx else tensor.astype(ctx)


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
