"""The sum of sparse gradients: one grouped allgather of all ranks' indices and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork


def allreduce_sparse(
    submitter: Submitter, tensors: Sequence[torch.Tensor], reduction: ReductionArguments, options: Any
) -> HorovodWork:
    """Sum or average sparse COO tensors of one shape over the ranks, in place: all get one result. Every rank of the group must
    call it.

    The tensors must have the same shape on all ranks. The number of their elements may differ.

    Raises:
        ArgumentError: the reduction is neither a sum nor an average.
    """
    if reduction.op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or reduction.prescale != 1.0:
        raise ArgumentError(
            "all_reduce of a sparse tensor: unsupported reduction operation; use ReduceOp.SUM or ReduceOp.AVG"
        )
    whole = tensors[0].detach()
    for each in tensors[1:]:
        whole = whole + each.detach()
    coalesced = whole.coalesce()
    parts = [coalesced.indices().t().contiguous(), coalesced.values().contiguous()]
    memory = submitter.memory_of(parts)
    made: dict[int, torch.Tensor] = {}
    grow = memory.grow(parts, made)

    def finish(_: Handle) -> None:
        total = torch.sparse_coo_tensor(made[0].t(), made[1], whole.shape).coalesce()
        if reduction.op is ReduceOp.AVERAGE:
            total = total / submitter.size
        for tensor in tensors:
            tensor.copy_(total)

    # One request: both become ready together, so indices and values always belong to the same call.
    return submitter.start(
        "allreduce",
        Operation.ALLGATHER,
        memory.read(parts),
        (),
        tensors,
        options,
        allocate=grow,
        finish=finish,
        memory=memory,
    )
