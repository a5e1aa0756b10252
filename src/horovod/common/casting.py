"""Compression of gradients by a cast to 16 bits. A binding says how its framework casts."""

from __future__ import annotations

from typing import Any

from horovod.common.compression import Compressor


class CastCompressor(Compressor):
    """Casts floating-point tensors to a narrower type. Other tensors travel unchanged.

    Attributes:
        narrow: the type that tensors travel in.
    """

    narrow: Any

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Whether the elements are real floating-point numbers."""
        raise NotImplementedError("a CastCompressor defines is_floating(tensor) -> bool")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The tensor with elements of type ``dtype``."""
        raise NotImplementedError("a CastCompressor defines cast(tensor, dtype) -> tensor")

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls.cast(tensor, cls.narrow) if cls.is_floating(tensor) else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx)
