"""How tensors are made smaller for the way, and restored afterwards. A compressor is two static methods; write your own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a narrower type; others stay."""

    narrow: tf.DType

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, cls.narrow) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = tf.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = tf.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
