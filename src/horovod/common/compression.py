"""What the choices for ``compression=`` have in common in every binding."""

from __future__ import annotations

from typing import Any


class Compressor:
    """How tensors are made smaller for the way, and restored afterwards: two static methods, the same on every rank."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and whatever :meth:`decompress` needs to undo it."""
        raise NotImplementedError("a Compressor defines compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its original form."""
        raise NotImplementedError("a Compressor defines decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor
