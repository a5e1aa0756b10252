"""PowerSGD: a matrix of gradients is sent as two factors of low rank.

One step of subspace iteration computes the factors, beginning with those of the last step (warm start). The error of this
approximation is added to the next step's gradient (error feedback). For a matrix M of n rows and m columns, and rank r:

1. ``P = M Q``, with Q of shape (m, r) from the last step. P is reduced over the ranks, and its columns are orthonormalised.
2. ``Q = M' P`` is reduced over the ranks. The gradient becomes ``P Q'``.

So r (n + m) elements are sent instead of n m. Gradients of fewer than two dimensions, and those that would not become smaller,
are sent uncompressed, together with the first factors.

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
    """``hvd.Compression.powersgd(rank=2)``: sends gradients as factors of low rank, with error feedback and warm start.

    Gradients of more than two dimensions are treated as matrices whose rows are the first dimension. 16-bit gradients are
    factored in float32. It needs two allreduces per bucket, and memory for one more copy of the gradients.

    Args:
        rank: the number of columns of the factors. A higher number is more exact and slower.

    Raises:
        ValueError: ``rank`` is not a positive integer.
    """

    def __init__(self, rank: int = 2) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"the rank of PowerSGD must be a positive integer, not {rank!r}")
        self.rank = rank

    # The same on all ranks, except in the step after a join. Any right factor gives a correct result, only a less exact one.
    common = frozenset(["factor"])

    def reduce(
        self, gradients: Mapping[str, torch.Tensor], memory: Mapping[str, dict[str, Any]], collectives: Collectives
    ) -> Steps:
        # By name: each matrix to send, (n, m), and its left factor, (n, r)
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
            if not torch.isfinite(left).all():  # some rank's gradient has overflowed; `left` is the same on all ranks
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
        """The number of columns of the factors of a gradient of this shape. 0: it is sent uncompressed."""
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
