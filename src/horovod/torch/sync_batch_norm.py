"""``SyncBatchNorm``: batch normalisation with the mean and variance of all ranks' batches.

Forward gathers one row from each rank: its means, its sums of squared deviations, and the number of elements. These give the
statistics of the concatenated batch. Backward adds up two sums over the ranks, which give the gradients of the statistics. On
GPUs PyTorch's kernels do that (:mod:`horovod.torch.fused_batch_norm`).
Deviations from a rank's own mean are exact even if the mean is much larger than the deviation; sums of squares are not.

Sources: Ioffe and Szegedy, "Batch Normalization", 2015 (arXiv:1502.03167), for the gradients; Chan, Golub and LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979, for combining the statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from horovod._bindings.reductions import Sum
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import set_id
from horovod.torch import fused_batch_norm
from horovod.torch.ops.allgather import allgather
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.uncompiled import uncompiled


class SyncBatchNorm(_BatchNorm):
    """Use in place of ``torch.nn.BatchNorm1d``, ``2d`` or ``3d``. Every member of ``process_set`` must have the same layers.

    In training, forward and backward are collectives: every member must call them in the same order. Batches may have any
    size, also 0. Outputs, gradients of inputs and running statistics are those of one process with the concatenated batch.
    Gradients of weight and bias are this rank's part, which the optimizer reduces like all other gradients. In evaluation,
    and in a set of one rank, it is ordinary batch normalisation.

    Args:
        num_features: the number of channels, which is the size of dimension 1 of the input.
        eps: added to the variance.
        momentum: the weight of new statistics in the running ones. None: a cumulative average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics. Without them, evaluation also uses the statistics of the
            batch.
        process_set: the ranks whose batches are normalised together.
        device, dtype: the device and the dtype of the parameters and buffers, as for ``torch.nn.BatchNorm2d``.

    Shape:
        input and output (N, C, ...), at least two-dimensional, of a floating-point dtype. 16-bit floats are computed in
        float32.

    Raises:
        ValueError: in forward: fewer than two dimensions, other than ``num_features`` channels, or all batches together have
            fewer than two values per channel.
        HorovodInternalError: in forward and backward: the ranks disagree, or the job has failed.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        set_id(process_set)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: ProcessSet | None = None, process_set: ProcessSet | None = None
    ) -> torch.nn.Module:
        """Replace every batch normalisation in a tree of modules, as ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does.

        The new layers use the parameters and buffers of the old ones, not copies, so an existing optimizer still works. A
        layer that is used in several places is replaced by one new layer. Hooks on replaced layers are lost. Layers that are
        already ``hvd.SyncBatchNorm`` are not changed. Nothing is communicated.

        Args:
            module: is changed in place, unless it is a batch normalisation itself.
            process_group: another name for ``process_set``, for scripts that use PyTorch's class.
            process_set: the ranks whose batches are normalised together. None: all ranks.

        Returns:
            ``module``, or the new layer if ``module`` is a batch normalisation.

        Raises:
            TypeError: ``module`` is not a module, or the process set is not a :class:`ProcessSet` but, for example, a group of
                ``torch.distributed``.
            ValueError: both names are used, or a lazy layer has had no input yet, so its channels are not known.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"convert_sync_batchnorm expects a torch.nn.Module, not {type(module).__name__}")
        if process_group is not None and process_set is not None:
            raise ValueError("process_group is another name for process_set; pass one of them")
        chosen = process_set if process_set is not None else process_group
        if chosen is None:
            chosen = global_process_set
        set_id(chosen)
        made: dict[torch.nn.Module, torch.nn.Module] = {}
        for parent in [*module.modules()]:
            for name, child in [*parent._modules.items()]:  # named_children() returns a module only once
                if child is not None and _is_replaced(child):
                    if child not in made:
                        made[child] = cls._made_of(child, chosen)
                    setattr(parent, name, made[child])
        return cls._made_of(module, chosen) if _is_replaced(module) else module

    @classmethod
    def _made_of(cls, layer: torch.nn.Module, process_set: ProcessSet) -> SyncBatchNorm:
        assert isinstance(layer, _BatchNorm)
        if any(torch.nn.parameter.is_lazy(each) for each in (layer.weight, layer.running_mean) if each is not None):
            raise ValueError(
                f"{type(layer).__name__} has no number of channels yet: call the model once before you convert it"
            )
        made = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set,
            device="meta",  # its parameters and buffers are replaced below
        )
        made.weight, made.bias = layer.weight, layer.bias
        made.running_mean, made.running_var = layer.running_mean, layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        made.training = layer.training
        return made

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input of {self.num_features} channels in dimension 1, got {list(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        by_own_statistics = self.training or self.running_mean is None
        if not by_own_statistics or self.process_set.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.device.type in fused_batch_norm.DEVICES:
            return self._forward_fused(input)
        statistics = _gather_statistics(input, self.process_set)
        if self.training and self.running_mean is not None:
            self._update_running(statistics)
        result: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
            input, self.weight, self.bias, statistics, self.eps, self.process_set
        )
        return result

    def _forward_fused(self, input: torch.Tensor) -> torch.Tensor:
        updates = self.training and self.running_mean is not None
        result: torch.Tensor = fused_batch_norm.FusedNormalize.apply(  # type: ignore[no-untyped-call]  # as below
            input,
            self.weight,
            self.bias,
            self.running_mean if updates else None,
            self.running_var if updates else None,
            self._count_batch() if updates else 0.0,
            self.eps,
            self.process_set,
        )
        return result

    def _count_batch(self) -> float:
        """Count a batch; the weight of its statistics in the running ones. With ``momentum=None`` the host reads the count."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _update_running(self, statistics: _Statistics) -> None:
        assert self.running_mean is not None and self.running_var is not None
        factor = self._count_batch()
        unbiased = statistics.variance * (statistics.elements / (statistics.elements - 1))
        self.running_mean.lerp_(statistics.mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def _is_replaced(module: torch.nn.Module) -> bool:
    """Whether it is a batch normalisation that is not a :class:`SyncBatchNorm` yet."""
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


class _Statistics(NamedTuple):
    """Statistics of the concatenated batch.

    Attributes:
        mean, variance: float64 of shape (C,). The variance is biased.
        elements: the number of elements per channel.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    elements: float


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 or float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _other_dimensions(tensor: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _per_channel(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A (C,) vector in the type of ``like`` and shaped to be broadcast along its channels."""
    return vector.to(like.dtype).reshape(1, -1, *[1] * (like.dim() - 2))


@uncompiled
@torch.no_grad()
def _gather_statistics(input: torch.Tensor, process_set: ProcessSet) -> _Statistics:
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    row = torch.zeros(1, 2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        wide = _wide(input)
        others = _other_dimensions(wide)
        mean = wide.mean(others)
        centred = wide - _per_channel(mean, wide)
        correction = centred.sum(others).double() / count  # the rounding error of the mean
        row[0, :channels] = mean.double() + correction
        row[0, channels:-1] = centred.square_().sum(others).double() - count * correction.square()
        row[0, -1] = count
    rows = allgather(row, f"sync_batch_norm.statistics.{channels}", process_set)
    means, deviations, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum().item()
    fused_batch_norm.check_enough(total, input)
    mean = (means * counts).sum(0) / total
    variance = (deviations + counts * (means - mean).square()).sum(0) / total
    return _Statistics(mean, variance, total)


@uncompiled
class _Normalize(torch.autograd.Function):
    """Normalises with given statistics. Its backward takes into account that they depend on the inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, statistics.mean, torch.rsqrt(statistics.variance + eps))
        ctx.elements = statistics.elements
        ctx.process_set = process_set
        wide = _wide(input)
        mean, variance = statistics.mean.to(wide.dtype), statistics.variance.to(wide.dtype)
        scale = None if weight is None else weight.to(wide.dtype)
        shift = None if bias is None else bias.to(wide.dtype)
        return F.batch_norm(wide, mean, variance, scale, shift, training=False, eps=eps).to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        grad, others = _wide(grad_output), _other_dimensions(input)
        centred = _wide(input).to(grad.dtype) - _per_channel(mean, grad)
        # Per channel: sums[0] of the gradient, sums[1] of its product with the deviations. First of this rank, later of all.
        sums = torch.stack([grad.sum(others), (grad * centred).sum(others)]).double()
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_weight = (sums[1] * inverse_deviation).to(weight.dtype) if wants_weight else None
        grad_bias = sums[0].to(weight.dtype, copy=True) if wants_bias else None
        grad_input = None
        if wants_input:
            name = f"sync_batch_norm.sums.{len(mean)}"
            allreduce_(sums, name=name, op=Sum, process_set=ctx.process_set)
            factor = inverse_deviation if weight is None else inverse_deviation * weight
            slope = sums[1] * inverse_deviation.square() / ctx.elements
            centred.mul_(_per_channel(slope, grad)).add_(_per_channel(sums[0] / ctx.elements, grad))
            grad_input = ((grad - centred) * _per_channel(factor, grad)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None
