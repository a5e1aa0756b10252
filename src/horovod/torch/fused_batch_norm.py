"""Batch normalisation over the ranks by PyTorch's kernels for GPUs, in which the host never waits for the GPU.

Forward gathers one row from each rank: its means, its inverse standard deviations, and the number of elements. The kernel that
combines them takes the numbers from the GPU, so the host never reads them. Backward adds up two sums over the ranks. The
kernels exist for GPUs alone; elsewhere :mod:`horovod.torch.sync_batch_norm` computes the same.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod._bindings.reductions import Sum
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.ops.allgather import allgather
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.uncompiled import uncompiled

DEVICES = {"cuda"}
"""The kinds of devices that have the kernels."""


@uncompiled
class FusedNormalize(torch.autograd.Function):
    """Normalises by the statistics of all ranks' batches, and updates the running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        input = _dense(input)
        channels = input.shape[1]
        rows = _gather(input, eps, process_set)
        counts = rows[:, -1]
        # A running statistic of another type is updated here, as the kernel wants one type.
        in_kernel = running_mean is not None and running_mean.dtype == rows.dtype
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            rows,
            rows[:, :channels],
            rows[:, channels:-1],
            running_mean if in_kernel else None,
            running_var if in_kernel else None,
            momentum,
            eps,
            counts,
        )
        if running_mean is not None and running_var is not None and not in_kernel:
            total = counts.sum()
            variance = (inverse.square().reciprocal() - eps) * (total / (total - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(variance.to(running_var.dtype), momentum)
        ctx.save_for_backward(input, weight, mean, inverse, counts.to(torch.int32))
        ctx.process_set = process_set
        if not input.numel():
            return torch.empty_like(input)
        return torch.batch_norm_elemt(input, weight, bias, mean, inverse, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        input, weight, mean, inverse, counts = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = _like(grad_output, input)
        if input.numel():
            sum_grad, sum_product, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, input, mean, inverse, weight, wants_input, wants_weight, wants_bias
            )
        else:
            sum_grad = sum_product = torch.zeros_like(mean)
            grad_weight = grad_bias = torch.zeros_like(mean if weight is None else weight)
        grad_input = None
        if wants_input:
            sums = torch.stack([sum_grad, sum_product])
            allreduce_(sums, name=f"sync_batch_norm.sums.{len(mean)}", op=Sum, process_set=ctx.process_set)
            grad_input = torch.zeros_like(input)
            if input.numel():
                grad_input = torch.batch_norm_backward_elemt(
                    grad, input, mean, inverse, weight, sums[0], sums[1], counts
                )
        grads = (grad_input, grad_weight if wants_weight else None, grad_bias if wants_bias else None)
        return *grads, None, None, None, None, None


def _gather(input: torch.Tensor, eps: float, process_set: ProcessSet) -> torch.Tensor:
    """All ranks' means, inverse deviations and counts, a row each; a rank with elements is first.

    The kernel divides by the count of the first rows, so that must not be 0.

    Raises:
        ValueError: all batches together have fewer than two values per channel.
    """
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    if count:
        mean, inverse = torch.batch_norm_stats(input, eps)
    else:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        mean = torch.zeros(channels, dtype=wide, device=input.device)
        inverse = torch.full_like(mean, eps**-0.5 if eps else 0.0)  # of a variance of 0
    own = torch.full((1,), float(count), dtype=mean.dtype, device=mean.device)
    row = torch.cat([mean, inverse, own]).reshape(1, -1)
    rows = allgather(row, f"sync_batch_norm.statistics.{channels}", process_set)
    if count < 2:  # only then can all of them be too few, and only then does the host look
        check_enough(rows[:, -1].sum().item(), input)
    order = rows[:, -1].argsort(descending=True, stable=True)
    return rows[order]


def check_enough(total: float, input: torch.Tensor) -> None:
    """Raises ValueError unless a variance can be computed from ``total`` values per channel."""
    if total < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {total:g} in the batches of all ranks together; "
            f"this rank's input is of shape {list(input.shape)}."
        )


def _dense(input: torch.Tensor) -> torch.Tensor:
    """The input in one of the orders of elements that the kernels take."""
    for order in (torch.channels_last, torch.channels_last_3d):
        if input.dim() == (4 if order is torch.channels_last else 5) and input.is_contiguous(memory_format=order):
            return input
    return input.contiguous()


def _like(gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient in the order of the input's elements."""
    if gradient.stride() == input.stride():
        return gradient
    return torch.empty_like(input, dtype=gradient.dtype).copy_(gradient)
