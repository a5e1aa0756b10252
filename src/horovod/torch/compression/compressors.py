"""Compressors of single tensors. A compressor is a class with two static methods; scripts may pass their own.

Compressors that keep state or need several collectives derive from
:class:`~horovod.torch.compression.bucket_compression.BucketCompressor`.
"""

from __future__ import annotations

import torch

from horovod._bindings.compression import CastCompressor, Compressor, Int4Compressor, Int8Compressor, NoneCompressor
from horovod.torch.compression.powersgd import PowerSGD
from horovod.torch.compression.topk import TopK

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TorchCast(CastCompressor):
    @staticmethod
    def can_cast(tensor: torch.Tensor) -> bool:
        return tensor.dtype.is_floating_point

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(_TorchCast):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = torch.float16


class BF16Compressor(_TorchCast):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = torch.bfloat16


class Compression:
    """The choices for ``compression=``. Only optimizers accept ``powersgd(rank=2)`` and ``topk(ratio=0.01)``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    powersgd = PowerSGD
    topk = TopK
