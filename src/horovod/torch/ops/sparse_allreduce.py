"""allreduce of sparse tensors: it gathers their indices and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod._bindings.reductions import Average, Sum, reduction
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import full_name
from horovod.torch.ops.allgather import allgather_async
from horovod.torch.ops.handles import synchronize
from horovod.torch.tensors import plain
from horovod.torch.uncompiled import uncompiled


@uncompiled
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to sum or average a sparse COO tensor over the ranks. It gathers the indices and values of all ranks.

    Every member of ``process_set`` must call it with a tensor of the same shape and dtype. The number of values may differ.

    Args:
        tensor: a sparse COO tensor, coalesced or not.
        name: identifies the call. Calls without a name are matched by their order.
        op: ``hvd.Average`` or ``hvd.Sum``. None: ``hvd.Average``.
        process_set: the ranks that reduce. This rank must be a member.

    Returns:
        A function that waits for the result, and returns it: a sparse tensor that is not coalesced.

    Raises:
        ValueError: ``op`` is not Sum or Average, or the tensor is not a sparse COO tensor. Otherwise as
            :func:`horovod.torch.ops.allgather.allgather_async`.
    """
    name = full_name("", name)[1:]
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
