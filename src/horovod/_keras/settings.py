"""Checks the arguments of ``DistributedOptimizer``, for every version of Keras and every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod._bindings.bucket_division import check_groups, chosen_groups
from horovod._bindings.compression import NoneCompressor
from horovod._bindings.reduction_settings import ReductionSettings
from horovod._bindings.reductions import check_predivide, reduction
from horovod._bindings.scalars import positive_whole, real, whole, whole_if_number
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import set_id
from horovod.observe.call_site import caller

MODULE = "horovod._keras"
"""The ``__module__`` of every class of distributed optimizers."""


@dataclass(frozen=True, kw_only=True)
class KerasSettings(ReductionSettings):
    """Arguments of a distributed optimizer.

    Attributes:
        name: the name of the optimizer. None: ``Distributed`` and the name of its class.
        device_dense, device_sparse: the devices on which TensorFlow puts dense and sparse results.
        average_aggregated: whether gradients that accumulate over ``passes`` calls are averaged; otherwise they are summed.
        scale_local: whether the gradients of local variables are divided by the number of ranks.
    """

    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    average_aggregated: bool = False
    scale_local: bool = True


def checked(
    *,
    compression: Any,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    **rest: Any,
) -> KerasSettings:
    """The settings for the arguments that the user passed.

    Raises:
        ValueError, TypeError: an argument is wrong. The text says which.
    """
    set_id(process_set)
    chosen = reduction(op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op currently only supports Average and Sum, not {op!r}")
    gradient_predivide_factor = real(gradient_predivide_factor, "gradient_predivide_factor")
    check_predivide(gradient_predivide_factor, chosen)
    passes = positive_whole(backward_passes_per_step, "backward_passes_per_step")
    groups = chosen_groups(groups, 0 if num_groups is None else whole(num_groups, "num_groups"))
    groups = check_groups(whole_if_number(groups), "variables", id)
    return KerasSettings(
        compression=NoneCompressor if compression is None else compression,
        op=chosen,
        predivide=gradient_predivide_factor,
        passes=passes,
        average_aggregated=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local=scale_local_gradients,
        line=caller(),
        **rest,
    )


def users_objects(custom_optimizers: Any, custom_objects: Any) -> dict[str, Any]:
    """The user's classes by name, for Keras to load a file."""
    return {**{kind.__name__: kind for kind in custom_optimizers or ()}, **(custom_objects or {})}
