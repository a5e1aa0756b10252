"""The kernels for batch normalisation that PyTorch has for CUDA alone, for devices that are none.

They compute what those kernels do, and as they do where it matters: the combination of statistics goes rank by rank and divides
by the number of elements so far. Written from the formulas, so what they cannot show is whether CUDA's have another convention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _others(tensor: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _along(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.to(like.dtype).reshape(1, -1, *[1] * (like.dim() - 2))


def _stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(input)
    mean = wide.mean(_others(wide))
    variance = (wide - _along(mean, wide)).square().mean(_others(wide))
    return mean, torch.rsqrt(variance + eps)


def _gather(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    average, squares, seen = torch.zeros_like(mean[0]), torch.zeros_like(mean[0]), torch.zeros_like(counts[0])
    for each, inverse, count in zip(mean, invstd, counts, strict=True):
        factor = 1 / (seen + count)
        squares = squares + (inverse**-2 - eps) * count + (average - each).square() * seen * count * factor
        average = seen * factor * average + count * factor * each
        seen = seen + count
    if running_mean is not None and running_var is not None:
        assert running_mean.dtype == counts.dtype == mean.dtype, "the kernel wants one type"
        running_mean.mul_(1 - momentum).add_(average * momentum)
        running_var.mul_(1 - momentum).add_(squares / (seen - 1) * momentum)
    return average, torch.rsqrt(squares / seen + eps)


def _elemt(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    wide = _wide(input)
    normal = (wide - _along(mean, wide)) * _along(invstd, wide)
    if weight is not None:
        normal = normal * _along(weight, wide)
    return (normal if bias is None else normal + _along(bias, wide)).to(input.dtype)


def _backward_reduce(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, ...]:
    assert grad.stride() == input.stride(), "the kernel wants one order of elements"
    wide = _wide(grad)
    sums = wide.sum(_others(wide)).to(mean.dtype)
    products = (wide * (_wide(input) - _along(mean, wide))).sum(_others(wide)).to(mean.dtype)
    of = mean if weight is None else weight
    return sums, products, (products * invstd).to(of.dtype), sums.to(of.dtype, copy=True)


def _backward_elemt(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    assert count.dtype == torch.int32
    wide, total = _wide(grad), count.sum()
    slope = sum_dy_xmu * invstd.square() / total
    factor = invstd if weight is None else invstd * weight.to(invstd.dtype)
    centred = _wide(input) - _along(mean, wide)
    return ((wide - _along(sum_dy / total, wide) - centred * _along(slope, wide)) * _along(factor, wide)).to(
        input.dtype
    )


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.batch_norm_stats.default: _stats,
    _aten.batch_norm_gather_stats_with_counts.default: _gather,
    _aten.batch_norm_elemt.default: _elemt,
    _aten.batch_norm_backward_reduce.default: _backward_reduce,
    _aten.batch_norm_backward_elemt.default: _backward_elemt,
}
"""By operation, what computes it."""
