"""What the operations' arguments mean: reduction, splits. The same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
    reduction,
)
from horovod.core.process_set import ProcessSet
from horovod.core.submission.arguments import real_number, set_id, shown, whole_numbers
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.compression.bucket_compression import BucketCompressor

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Reducing",
    "Sum",
    "handle_average_backwards_compatibility",
    "reduction",
    "split_rows",
    "compressed",
    "tracked",
]


class Reducing(msgspec.Struct, frozen=True):
    """How to reduce: what all forms of allreduce and reducescatter are told.

    Attributes:
        op: of all ranks' elements.
        prescale, postscale: factors before and after it.
        process_set: over whose ranks.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet

    @classmethod
    def of(
        cls, op: Any, average: bool | None, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
    ) -> Reducing:
        """From the arguments as users give them.

        Raises:
            TypeError, ValueError: one is of no use; see :func:`reduction` and :mod:`horovod.core.submission.arguments`.
        """
        prescale = real_number(prescale_factor, "prescale_factor")
        postscale = real_number(postscale_factor, "postscale_factor")
        set_id(process_set)
        return cls(reduction(op, average), prescale, postscale, process_set)


def split_rows(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """``splits`` of an alltoall as a list; None where it is to be even.

    Raises:
        TypeError: something else than whole numbers.
        ValueError: a tensor that is not one-dimensional, or not of 32-bit integers.
    """
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.dim()} dimensions")
        if splits.numel() and splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}")
        return [int(split) for split in splits.tolist()]
    return whole_numbers(splits, "splits")


def tracked(*tensors: torch.Tensor) -> bool:
    """Whether autograd must know what becomes of the tensors; telling it costs as much as a small collective's arguments."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
    return False


def compressed(
    compression: type[Compressor],
    tensors: Sequence[torch.Tensor],
    reduce: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """What ``reduce`` makes of the tensors, which travel compressed.

    Raises:
        TypeError: ``compression`` is no compressor.
    """
    if compression is NoneCompressor:
        return list(reduce(list(tensors)))
    is_for_buckets = isinstance(compression, BucketCompressor)  # whose compress() says where it belongs
    if not is_for_buckets and not all(
        callable(getattr(compression, each, None)) for each in ("compress", "decompress")
    ):
        raise TypeError(
            f"compression={shown(compression)}: expected one of hvd.Compression, or a class with compress() and decompress()"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce([travels for travels, _ in pairs])
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]
