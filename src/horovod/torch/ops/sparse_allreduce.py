"""allreduce of sparse tensors: an allgather of their indices and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.core.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import full_name
from horovod.torch.ops.allgather import allgather_async
from horovod.torch.ops.arguments import Average, Sum, reduction
from horovod.torch.ops.handles import synchronize
from horovod.torch.ops.tensors import plain


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start summing (or averaging) a sparse COO tensor over the ranks, by gathering the indices and values of all.

    Returns:
        A function that waits and returns the sparse tensor, not coalesced.
    """
    full_name("", name)
    chosen = reduction(op)
    if chosen not in (Sum, Average):
        raise ValueError(f"a sparse tensor can be reduced with hvd.Sum or hvd.Average, not hvd.{chosen.label}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"expected a sparse COO tensor, not {getattr(tensor, 'layout', type(tensor).__name__)}")
    tensor = tensor.coalesce() if not tensor.is_coalesced() else tensor
    indices_name, values_name = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices = allgather_async(plain(tensor.indices().t()), indices_name, process_set)
    values = allgather_async(plain(tensor.values()), values_name, process_set)

    def result() -> torch.Tensor:
        gathered: torch.Tensor = synchronize(values)
        where: torch.Tensor = synchronize(indices)
        if chosen == Average:
            gathered = gathered / (process_set.size() or 1)
        return torch.sparse_coo_tensor(where.t(), gathered, tensor.size())

    return result
