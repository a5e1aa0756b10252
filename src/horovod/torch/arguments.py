"""What the operations' arguments mean: reduction, names, splits. The same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.util import get_average_backwards_compatibility_fun

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


class _Names:
    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_Names)


def reduction(op: Any, average: bool | None = None) -> ReduceOp:
    """The reduction that ``op=`` and the older ``average=`` ask for.

    Raises:
        ValueError: both are given, or there is no such reduction.
    """
    chosen = handle_average_backwards_compatibility(op, average)
    if type(chosen) is ReduceOp:
        return chosen
    try:
        return ReduceOp(chosen)
    except ValueError:
        names = ", ".join(f"hvd.{each.label}" for each in ReduceOp)
        raise ValueError(f"op={op!r} is no reduction; use one of {names}") from None


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


def tracked(tensor: torch.Tensor) -> bool:
    """Whether autograd must know what becomes of ``tensor``; telling it costs as much as a small collective's arguments."""
    return torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad
