"""How gradients are made smaller for the way, and restored afterwards. A compressor is two static methods; write your own.

What needs a memory or several collectives has an interface of its own, :mod:`horovod.torch.compression.bucket_compression`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.compression import Compressor, NoneCompressor
from horovod.torch.compression.powersgd import PowerSGD
from horovod.torch.compression.topk import TopK

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a narrower type; others stay."""

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.narrow) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = torch.bfloat16


class Compression:
    """The choices for ``compression=``. ``powersgd(rank=2)`` and ``topk(ratio=0.01)`` are for optimizers only."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD
    topk = TopK
