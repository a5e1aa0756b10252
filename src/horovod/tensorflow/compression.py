"""Compressors of tensors. A compressor is a class with two static methods; scripts may pass their own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._bindings.compression import CastCompressor, Compressor, Int4Compressor, Int8Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorFlowCast(CastCompressor):
    @staticmethod
    def can_cast(tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)

    @staticmethod
    def cast(tensor: Any, dtype: tf.DType) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_TensorFlowCast):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = tf.float16


class BF16Compressor(_TensorFlowCast):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = tf.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
