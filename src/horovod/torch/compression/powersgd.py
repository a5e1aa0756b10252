"""PowerSGD: a matrix of gradients travels as two thin factors of low rank.

One step of subspace iteration finds the factors, from where the last step ended (warm start), and what they miss is added to
the next step's gradient (error feedback). For a matrix M of n rows and m columns, and rank r:

1. ``P = M Q``, with Q of shape (m, r) from the step before; P is reduced over the ranks, and its columns made orthonormal;
2. ``Q = M' P`` is reduced over the ranks; the gradient becomes ``P Q'``.

So r (n + m) elements travel instead of n m. What has fewer than two dimensions, or would not become smaller, travels as it
is, together with the first factors.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
2019 (arXiv:1905.13727), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from horovod.torch.compression.bucket_compression import BucketCompressor, Collectives, Steps


class PowerSGD(BucketCompressor):
    """``hvd.Compression.powersgd(rank=2)``: gradients travel as factors of low rank, with error feedback and warm start.

    Weights of more than two dimensions are seen as matrices of as many rows as their first dimension has. 16-bit gradients
    are factored in float32. It takes two allreduces a bucket, and memory for one more copy of the gradients.

    Args:
        rank: columns of the factors; more is closer to the uncompressed gradient, and slower.

    Raises:
        ValueError: ``rank`` is not a positive integer.
    """

    def __init__(self, rank: int = 2) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"the rank of PowerSGD must be a positive integer, not {rank!r}")
        self.rank = rank

    # Alike on all ranks but for one step after a join; the left factors need not come from the best place to be right.
    common = frozenset(["factor"])

    def reduce(
        self, gradients: Mapping[str, torch.Tensor], memory: Mapping[str, dict[str, Any]], collectives: Collectives
    ) -> Steps:
        # By name: what to send of each matrix, (n, m), and its left factor, (n, r)
        matrices: dict[str, torch.Tensor] = {}
        lefts: dict[str, torch.Tensor] = {}
        plain: list[torch.Tensor] = []
        for name, gradient in gradients.items():
            columns = self._columns(gradient.shape)
            if columns == 0:
                plain.append(gradient)
                continue
            matrix = gradient.reshape(len(gradient), -1).to(_wide(gradient.dtype), copy=True)
            remembered = memory[name]
            if "error" in remembered:
                matrix += remembered["error"]
            if "factor" not in remembered:
                remembered["factor"] = _start(name, matrix.shape[1], columns).to(matrix)
            matrices[name] = matrix
            lefts[name] = matrix @ remembered["factor"]
        yield collectives.allreduce([*lefts.values(), *plain], "left")
        rights: dict[str, torch.Tensor] = {}
        for name, left in lefts.items():
            if not torch.isfinite(left).all():  # some rank's gradient overflowed; so it looks on all ranks
                gradients[name].fill_(torch.nan)
                continue
            lefts[name] = torch.linalg.qr(left).Q.contiguous()
            rights[name] = matrices[name].T @ lefts[name]
            memory[name]["error"] = matrices[name].addmm_(lefts[name], rights[name].T, alpha=-1)
        if rights:
            yield collectives.allreduce(list(rights.values()), "right")
        for name, right in rights.items():
            gradients[name].copy_((lefts[name] @ right.T).reshape(gradients[name].shape))
            memory[name]["factor"] = right

    def _columns(self, shape: torch.Size) -> int:
        """Columns of the factors of a gradient of this shape; 0 if it is to travel as it is."""
        if len(shape) < 2:
            return 0
        elements = shape.numel()
        rows = shape[0]
        columns = min(self.rank, rows, elements // rows if rows else 0)
        return columns if elements and columns * (rows + elements // rows) < elements else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _start(name: str, rows: int, columns: int) -> torch.Tensor:
    """The first right factor: random, and the same on all ranks."""
    random = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(rows, columns, generator=random)
