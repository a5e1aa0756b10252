"""Checks the arguments of ``DistributedOptimizer`` before anything is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from horovod._bindings.bucket_division import check_groups, chosen_groups
from horovod._bindings.reduction_settings import ReductionSettings
from horovod._bindings.reductions import check_members, check_predivide, reduction
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.observe.call_site import caller
from horovod.torch.compression import Compressor
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.parameter_names import parameter_names
from horovod.torch.tensors import is_dtensor


def check_passes(passes: int) -> int:
    """Check ``backward_passes_per_step``.

    Raises:
        ValueError: it is not a positive integer.
    """
    if not isinstance(passes, int | np.integer) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, an integer; not {passes!r}")
    return int(passes)


def check_parameter(name: str, parameter: torch.Tensor, op: ReduceOp) -> None:
    """Check that the gradients of a parameter can be reduced.

    Raises:
        ValueError: the gradients cannot be reduced. The text says what to do.
    """
    if is_dtensor(type(parameter)):
        raise ValueError(
            f"parameter {name!r} is a DTensor: FSDP2 (fully_shard) or tensor parallelism communicates its gradients "
            "already. Use the optimizer without DistributedOptimizer, or the model without them"
        )
    if parameter.dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        raise ValueError(
            f"parameter {name!r} is complex: its gradients can be reduced with hvd.Average, hvd.Sum or hvd.Adasum, not "
            f"hvd.{op.label}"
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(ReductionSettings):
    """The checked arguments of ``DistributedOptimizer``.

    Attributes:
        names: the names of parameters, by parameter. All parameters that the optimizer has now have one.
    """

    names: dict[torch.Tensor, str]

    def over(self, names: dict[torch.Tensor, str], groups: int | list[list[torch.Tensor]] | None) -> OptimizerSettings:
        """The same settings for other parameters."""
        return dataclasses.replace(self, names=names, groups=groups)


def check_arguments(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    compression: type[Compressor] | BucketCompressor,
    passes: int,
    op: Any,
    predivide: float,
    num_groups: int,
    groups: Any,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> OptimizerSettings:
    """Check the arguments of ``DistributedOptimizer``, in the same order.

    Raises:
        ValueError, NotImplementedError: an argument is wrong. The text says which.
    """
    chosen = reduction(op)
    check_predivide(predivide, chosen)
    groups = chosen_groups(groups, num_groups)
    check_passes(passes)
    if isinstance(compression, BucketCompressor) and (
        chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM) or predivide != 1.0
    ):
        raise ValueError(
            f"{type(compression).__name__} reduces gradients with op=hvd.Average or hvd.Sum and no gradient_predivide_factor"
        )
    _check_shapes(optimizer)
    names = parameter_names(optimizer, named_parameters)
    checked = check_groups(groups, "torch.Tensor", _member)
    check_members(chosen, process_set)
    return OptimizerSettings(
        names=names,
        compression=compression,
        passes=passes,
        op=chosen,
        predivide=predivide,
        groups=checked,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        line=caller(),
    )


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if any(map(is_lazy, group["params"])):
            raise ValueError(
                f"group {index} has parameters of lazy modules, whose shapes are not known before their first forward pass. "
                "Call the model with a batch, then hvd.broadcast_parameters(), before you make the optimizer distributed"
            )


def _member(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError("groups must consist of torch.Tensor.")
    return value
