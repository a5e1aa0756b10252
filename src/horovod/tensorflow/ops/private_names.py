"""The operations under private names that projects for gradient compression call.

Their default reduction is ``hvd.Sum``, and they do not compress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod._bindings.reductions import Sum
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.tensorflow.ops.allreduce import allreduce, grouped_allreduce
from horovod.tensorflow.ops.reducescatter import grouped_reducescatter, reducescatter


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: Any = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`~horovod.tensorflow.ops.allreduce.allreduce`, a sum by default."""
    return allreduce(
        tensor,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
    )


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`~horovod.tensorflow.ops.allreduce.grouped_allreduce`, sums by default."""
    return grouped_allreduce(
        tensors,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
    )


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Any = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As :func:`~horovod.tensorflow.ops.reducescatter.reducescatter`, a sum by default."""
    return reducescatter(
        tensor,
        name=name,
        op=op,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def _grouped_reducescatter(
    tensors: Sequence[Any],
    op: Any = Sum,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As :func:`~horovod.tensorflow.ops.reducescatter.grouped_reducescatter`, sums by default."""
    return grouped_reducescatter(
        tensors, op=op, process_set=process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )
