"""Checks the arguments of the operations: splits, compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horovod.core.submission.arguments import shown, whole_numbers
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.compression.bucket_compression import BucketCompressor


def split_rows(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """``splits`` of an alltoall as a list. None means an even division.

    Raises:
        TypeError: not whole numbers.
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


def compressed(
    compression: type[Compressor],
    tensors: Sequence[torch.Tensor],
    reduce: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Compress the tensors, call ``reduce`` with them, and decompress its results.

    Raises:
        TypeError: ``compression`` is not a compressor.
        ValueError: it is a compressor of an optimizer's buckets.
    """
    if compression is NoneCompressor or compression is None:
        return list(reduce(list(tensors)))
    is_for_buckets = isinstance(compression, BucketCompressor)  # its compress() raises, and says where to pass it
    if not is_for_buckets and not all(
        callable(getattr(compression, each, None)) for each in ("compress", "decompress")
    ):
        raise TypeError(
            f"compression={shown(compression)}: expected one of hvd.Compression, or a class with compress() and decompress()"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce([sent for sent, _ in pairs])
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]
