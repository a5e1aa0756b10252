"""reducescatter and its forms: reduce over the ranks; each rank keeps its rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.reductions import Average, ReductionArguments, Sum, checked_reduction
from horovod.core.lifecycle.context import worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import shard_rows
from horovod.core.submission import collectives
from horovod.torch.compression import Compression, Compressor
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.allgather import grouped_allgather
from horovod.torch.ops.arguments import compressed
from horovod.torch.ops.handles import register, synchronize
from horovod.torch.ops.tensors import check, empty, plain, tracked

_SINGLE, _GROUP = "reducescatter", "grouped_reducescatter"


def _members(process_set: ProcessSet) -> tuple[int, int]:
    """This rank's index in the set, and the size of the set."""
    worker = worker_of(process_set.process_set_id, Operation.REDUCESCATTER)
    return worker.index, len(worker.ranks)


def _start(
    prefix: str, tensors: Sequence[torch.Tensor], name: str | None, how: ReductionArguments, awaited: bool = False
) -> int:
    """Start the reducescatter, and return its handle. The result of a group is a tuple.

    Args:
        awaited: the caller waits for the result next.
    """
    index, size = _members(how.process_set)
    outputs = []
    for tensor in tensors:
        check(tensor)
        if not tensor.dim():
            raise ValueError("Reducescatter does not support scalar inputs.")
        rows = shard_rows(tensor.shape[0], size)[index]
        outputs.append(empty((rows, *tensor.shape[1:]), tensor.dtype, tensor.device))
    memory = memory_of(tensors, how)
    sources, targets = memory.read(tensors), memory.write(outputs)
    handle = collectives.reducescatter(
        prefix, name, sources, targets, how.op, how.prescale, how.postscale, how.process_set.process_set_id, awaited
    )
    result = outputs[0] if prefix == _SINGLE else tuple(outputs)
    return register(handle, memory, result)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce ``tensor``. The result is this rank's rows of the reduced tensor. Returns a handle.

    Of n rows over s ranks, each rank keeps n // s, and the first n % s ranks keep one more. ``op`` is hvd.Average or hvd.Sum.
    Shape, dtype, op and factors must agree. Errors as :func:`allreduce_async`, and ValueError for a tensor without dimensions.
    """
    return _start(_SINGLE, [tensor], name, checked_reduction(op, None, prescale_factor, postscale_factor, process_set))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter_async` of several tensors in one request. The result is a tuple."""
    how = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    return _start(_GROUP, list(tensors), name, how)


class HorovodReducescatter(torch.autograd.Function):
    """The gradients gather the rows of all ranks, and multiply them by both factors, and for a Sum by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, prefix: str, name: str | None, how: ReductionArguments, *tensors: torch.Tensor) -> Any:
        ctx.process_set = how.process_set
        ctx.factor = how.prescale * how.postscale * (_members(how.process_set)[1] if how.op == Sum else 1)
        return synchronize(_start(prefix, tensors, name, how, awaited=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = [plain(grad * ctx.factor) for grad in grads]
        return None, None, None, *grouped_allgather(rows, process_set=ctx.process_set)


HorovodGroupedReducescatter = HorovodReducescatter


def _scattered(
    prefix: str, tensors: Sequence[torch.Tensor], name: str | None, how: ReductionArguments
) -> Sequence[torch.Tensor]:
    """Reduce into new tensors, and let autograd record it if a tensor requires a gradient."""
    if tracked(*tensors):
        result = HorovodReducescatter.apply(prefix, name, how, *tensors)  # type: ignore[no-untyped-call]  # torch's
    else:
        result = synchronize(_start(prefix, tensors, name, how, awaited=True))
    return [result] if prefix == _SINGLE else result


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors in one request. Returns a list. Differentiable."""
    how = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    return compressed(compression, tensors, lambda sent: _scattered(_GROUP, sent, name, how))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of ``tensor``, as a new tensor. Differentiable."""
    how = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    return compressed(compression, [tensor], lambda sent: _scattered(_SINGLE, sent, name, how))[0]
