"""The sum of sparse gradients: one grouped allgather of all ranks' indices and values."""

from __future__ import annotations

from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle
from horovod.torch.device.memory import memory_of
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork


def allreduce_sparse(
    submitter: Submitter, tensor: torch.Tensor, reduction: ReductionArguments, options: Any
) -> HorovodWork:
    """Sum or average a sparse COO tensor over the ranks, in place. Every rank of the group must call it.

    The tensors must have the same shape on all ranks. The number of their elements may differ.

    Raises:
        ValueError: the reduction is neither a sum nor an average.
    """
    if reduction.op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or reduction.prescale != 1.0:
        raise ValueError("allreduce of a sparse tensor: only ReduceOp.SUM and ReduceOp.AVG are supported")
    coalesced = tensor.detach().coalesce()
    parts = [coalesced.indices().t().contiguous(), coalesced.values().contiguous()]
    memory = memory_of(parts)
    made: dict[int, torch.Tensor] = {}
    grow = memory.grow(parts, made)

    def finish(_: Handle) -> None:
        total = torch.sparse_coo_tensor(made[0].t(), made[1], tensor.shape).coalesce()
        if reduction.op is ReduceOp.AVERAGE:
            total = total / submitter.size
        tensor.copy_(total)

    # One request: both become ready together, so indices and values always belong to the same call.
    return submitter.start(
        "allreduce",
        Operation.ALLGATHER,
        memory.read(parts),
        (),
        [tensor],
        options,
        allocate=grow,
        finish=finish,
        memory=memory,
    )
