"""Shared by the choices for ``compression=`` of all bindings."""

from __future__ import annotations

from typing import Any

from horovod.comm.reduction import ReduceOp


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


class BlockCompressor(NoneCompressor):
    """Leaves tensors as they are: what travels between hosts of their reduction is compressed, with an integer for each element
    and a scale for each block (:mod:`horovod.comm.compression`). Only allreduces and optimizers take it.

    Attributes:
        form: one of :data:`horovod.comm.compression.blocks.FORMATS`.
    """

    form: str


class Int8Compressor(BlockCompressor):
    """8 bits for each element and a scale for each 256: a quarter of the bytes of float32, and 1/254 of the largest magnitude
    of a block as the largest error."""

    form = "int8"


class Int4Compressor(BlockCompressor):
    """4 bits for each element and a scale for each 64: an eighth of the bytes of float32, and 1/14 of the largest magnitude of
    a block as the largest error."""

    form = "int4"


def form_of(compression: Any, op: ReduceOp) -> str | None:
    """The format in which a choice of ``compression=`` has the bytes between hosts compressed.

    Returns:
        A format; "" if the script compresses tensors itself; None if it chooses nothing, so that HOROVOD_COMPRESSION does.

    Raises:
        ValueError: the reduction is no sum.
    """
    if compression is None or compression is NoneCompressor:
        return None
    form: str = getattr(compression, "form", "") if is_of_blocks(compression) else ""
    if form and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"hvd.Compression.{form} compresses sums: use op=hvd.Average or hvd.Sum, not hvd.{op.label}")
    return form


def is_of_blocks(compression: Any) -> bool:
    """Whether it is ``hvd.Compression.int8`` or ``int4``."""
    return isinstance(compression, type) and issubclass(compression, BlockCompressor)


def refuse_blocks(compression: Any, operation: str) -> None:
    """Raises ValueError for a compressor between hosts, if an operation has no such compression."""
    if is_of_blocks(compression):
        raise ValueError(
            f"hvd.Compression.{compression.form} is for allreduces and optimizers; {operation} takes hvd.Compression.none, "
            "fp16 or bf16"
        )


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
