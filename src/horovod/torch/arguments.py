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
from horovod.torch.compression import Compressor, NoneCompressor

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
        """From the arguments as users give them. Raises as :func:`reduction`."""
        return cls(reduction(op, average), prescale_factor, postscale_factor, process_set)


def split_rows(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """``splits`` of an alltoall as a list; None where it is to be even.

    Raises:
        ValueError: not one-dimensional, or not of 32-bit integers.
    """
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.dim()} dimensions")
        if splits.numel() and splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}")
        return [int(split) for split in splits.tolist()]
    return [int(split) for split in splits]


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
    """What ``reduce`` makes of the tensors, which travel compressed."""
    if compression is NoneCompressor:
        return list(reduce(list(tensors)))
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce([travels for travels, _ in pairs])
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]
