"""Shared by the choices for ``compression=`` of all bindings."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Makes tensors smaller before they are sent, and restores them afterwards: two static methods, the same on every rank."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what :meth:`decompress` needs to restore it."""
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


class CastCompressor(Compressor):
    """Casts tensors of wider floating-point types to ``narrow``, and back; other tensors stay as they are.

    A binding's base class defines :meth:`can_cast` and :meth:`cast` in terms of its framework; each choice sets ``narrow``.
    """

    narrow: Any

    @staticmethod
    def can_cast(tensor: Any) -> bool:
        """Whether the tensor's type is one that is cast."""
        raise NotImplementedError("a CastCompressor defines can_cast(tensor) -> bool")

    @staticmethod
    def cast(tensor: Any, data_type: Any) -> Any:
        """The tensor as ``data_type``; the tensor itself where it has that type."""
        raise NotImplementedError("a CastCompressor defines cast(tensor, data_type) -> tensor")

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls.cast(tensor, cls.narrow) if cls.can_cast(tensor) else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx)
