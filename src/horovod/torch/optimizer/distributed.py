"""``DistributedOptimizer``: an optimizer whose ``step()`` uses gradients reduced over all ranks.

A hook on every parameter reports during backward that its gradient is ready. The optimizer sends a full bucket at once, and the
ranks reduce it in the memory of the gradients (:mod:`horovod.torch.optimizer.gradient_passes`). At the end of each pass the
ranks reduce the other gradients that any rank has touched (:mod:`horovod.torch.optimizer.reduction_round`). So gradients are
reduced when ``backward()`` returns, and ``step()`` only steps (:mod:`horovod.torch.optimizer.gradient_optimizer`). With Adasum,
the ranks send the changes of the parameters instead of the gradients (:mod:`horovod.torch.optimizer.adasum`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.basics import size
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.torch.compression import Compression, Compressor
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.adasum import AdasumOptimizer
from horovod.torch.optimizer.data_loading import follow_data_loaders
from horovod.torch.optimizer.gradient_optimizer import GradientOptimizer
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.parameter_names import names_by_position
from horovod.torch.optimizer.settings import check_arguments
from horovod.torch.optimizer.wrapped import WrappedOptimizer, wrap

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | BucketCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Optimizer:
    """Make ``optimizer`` use gradients that are reduced over the ranks. Every rank must wrap the same parameters.

    Returns an optimizer of a class derived from that of ``optimizer``, with its parameter groups and its state. Use it instead
    of the original. In addition it has the methods ``synchronize()``, ``skip_synchronize()``, ``no_sync()`` and
    ``set_backward_passes_per_step()``. Parameters may be added (``add_param_group``), frozen and unfrozen later, at the same
    step on every rank.

    Each backward pass reduces the gradients that it has reached on any rank, as with PyTorch's DistributedDataParallel. When
    ``backward()`` returns, the script can clip them, unscale them with a ``torch.amp.GradScaler``, or read them. Gradients that
    no rank has reached stay as they are. Those that the script sets itself are reduced in ``step()`` or ``synchronize()``. All
    ranks must make the same passes and steps.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, names for messages. They must include all parameters of the optimizer.
        compression: one of ``hvd.Compression``, or your own :class:`~horovod.torch.compression.Compressor` or
            :class:`~horovod.torch.compression.bucket_compression.BucketCompressor`.
        backward_passes_per_step: gradients accumulate locally over this number of backward passes before they are reduced.
            They are summed, not averaged. A step after fewer passes reduces the gradients of these passes.
        op: ``hvd.Average``, ``hvd.Sum``, ``hvd.Min``, ``hvd.Max`` or ``hvd.Product``. With ``hvd.Adasum`` every rank makes its
            own step, and the changes are combined (:mod:`horovod.torch.optimizer.adasum`). ``groups`` and
            ``sparse_as_dense`` are then ignored.
        gradient_predivide_factor: f: an Average divides gradients by f before the sum, and by size / f afterwards.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of parameters whose gradients form one request. The default cuts by size.
        sparse_as_dense: reduce sparse gradients as dense ones. They are sparse again afterwards. This is needed if a rank may
            have no gradient for such a parameter in its first step, unless the optimizer is ``SparseAdam``.
        process_set: the ranks that reduce. Other ranks step with their own gradients.

    Raises:
        ValueError, NotImplementedError: an argument is wrong. The text says which.
    """
    if isinstance(optimizer, WrappedOptimizer) and optimizer._horovod_is_loaded:
        optimizer = optimizer._plain()  # type: ignore[assignment]  # of the wrapped class
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap the original")
    settings = check_arguments(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense,
        process_set,
    )
    front: type[WrappedOptimizer] = GradientOptimizer
    if settings.op == ReduceOp.ADASUM and size() > 1:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise NotImplementedError(
                "op=hvd.Adasum steps on some parameters at a time, which LBFGS cannot do; use hvd.Average"
            )
        front = AdasumOptimizer
    signature = [(settings.names[p], tuple(p.shape), str(p.dtype)) for p in names_by_position(optimizer)]
    follow_data_loaders()
    wrapped: _Optimizer = wrap(optimizer, front, settings, OptimizerIdentity(signature, process_set))
    return wrapped
