"""The sum of sparse gradients: an allgather of the indices and one of the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.reductions import ReductionArguments
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle
from horovod.torch.device.memory import memory_of
from horovod.torch.distributed.submission import Submitter, is_awaited
from horovod.torch.distributed.work import HorovodWork


def allreduce_sparse(submitter: Submitter, tensor: torch.Tensor, how: ReductionArguments, options: Any) -> HorovodWork:
    """Sum a sparse COO tensor over the ranks, in place. Sizes must agree; each rank has its own number of elements.

    Raises:
        ValueError: the reduction is not a sum.
    """
    if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or how.prescale != 1.0:
        raise ValueError("allreduce of a sparse tensor: only ReduceOp.SUM and ReduceOp.AVG are supported")
    coalesced = tensor.detach().coalesce()
    parts = [coalesced.indices().t().contiguous(), coalesced.values().contiguous()]
    memory = memory_of(parts)
    made: dict[int, torch.Tensor] = {}
    grow = memory.grow(parts, made)
    # One request: both become ready together, and no rank takes the indices of one call with the values of another.
    handle = submitter.submit(Operation.ALLGATHER, memory.read(parts), allocate=grow, awaited=is_awaited(options))

    def finish(_: Handle) -> None:
        total = torch.sparse_coo_tensor(made[0].t(), made[1], tensor.shape).coalesce()
        if how.op is ReduceOp.AVERAGE:
            total = total / submitter.size
        tensor.copy_(total)

    done: Callable[[Handle], None] = finish
    return submitter.work(handle, memory, [tensor], "allreduce", done, options)
