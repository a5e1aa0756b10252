"""reducescatter and its forms: reduce over the ranks; each rank keeps its rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod._bindings.compression import refuse_blocks
from horovod._bindings.reductions import Average, ReductionArguments, Sum, checked_reduction
from horovod.core.lifecycle.context import worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import shard_rows
from horovod.core.submission import collectives
from horovod.torch.compression import Compression, Compressor
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.allgather import grouped_allgather
from horovod.torch.ops.arguments import compressed
from horovod.torch.ops.handles import Started, register
from horovod.torch.tensors import check, empty, plain, tracked
from horovod.torch.uncompiled import uncompiled

_SINGLE, _GROUP = "reducescatter", "grouped_reducescatter"


def _members(process_set: ProcessSet) -> tuple[int, int]:
    """This rank's index in the set, and the size of the set."""
    worker = worker_of(process_set.process_set_id, Operation.REDUCESCATTER)
    return worker.index, len(worker.ranks)


def _start(
    prefix: str, tensors: Sequence[torch.Tensor], name: str | None, reduction: ReductionArguments, awaited: bool = False
) -> Started:
    """Start the reducescatter. The result of a group is a tuple.

    Args:
        awaited: the caller waits for the result next.
    """
    index, size = _members(reduction.process_set)
    outputs = []
    for tensor in tensors:
        check(tensor)
        if not tensor.dim():
            raise ValueError("Reducescatter does not support scalar inputs.")
        rows = shard_rows(tensor.shape[0], size)[index]
        outputs.append(empty((rows, *tensor.shape[1:]), tensor.dtype, tensor.device))
    memory = memory_of(tensors, reduction)
    sources, targets = memory.read(tensors), memory.write(outputs)
    handle = collectives.reducescatter(prefix, name, sources, targets, *reduction.positional, awaited)
    result = outputs[0] if prefix == _SINGLE else tuple(outputs)
    return Started(handle, memory, result)


@uncompiled
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce ``tensor`` over the ranks of ``process_set``, of which each gets some rows. Returns a handle.

    Of n rows over s ranks, each rank gets n // s, and the first n % s ranks get one more. Every member must call it with the
    same name, shape, dtype, op and factors. The script must not change the tensor until :func:`synchronize` has returned. Not
    differentiable.

    Args:
        tensor: a dense, contiguous tensor of at least one dimension. Dtypes and devices are those of :func:`allreduce_async`.
        name: identifies the call. Calls without a name are matched by their order.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the ranks that reduce. This rank must be a member.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards.

    Returns:
        A handle, for which :func:`synchronize` returns this rank's rows of the reduced tensor, as a new tensor.

    Raises:
        TypeError, ValueError: as :func:`allreduce_async`; or the tensor has no dimensions.
        HorovodInternalError: as :func:`allreduce_async`; or ``op`` is another reduction.
    """
    return register(
        _start(_SINGLE, [tensor], name, checked_reduction(op, None, prescale_factor, postscale_factor, process_set))
    )


@uncompiled
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter_async` of several tensors in one request, with the same errors.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device. Every member passes the same number of
            them in the same order.
        name, op, process_set, prescale_factor, postscale_factor: as for :func:`reducescatter_async`.

    Returns:
        A handle, for which :func:`synchronize` returns a tuple of new tensors in the order of ``tensors``.
    """
    reduction = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    return register(_start(_GROUP, list(tensors), name, reduction))


@uncompiled
class HorovodReducescatter(torch.autograd.Function):
    """The gradients gather the rows of all ranks, and multiply them by both factors, and for a Sum by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, prefix: str, name: str | None, reduction: ReductionArguments, *tensors: torch.Tensor) -> Any:
        ctx.process_set = reduction.process_set
        ctx.factor = (
            reduction.prescale
            * reduction.postscale
            * (_members(reduction.process_set)[1] if reduction.op == Sum else 1)
        )
        return _start(prefix, tensors, name, reduction, awaited=True).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = [plain(grad * ctx.factor) for grad in grads]
        return None, None, None, *grouped_allgather(rows, process_set=ctx.process_set)


HorovodGroupedReducescatter = HorovodReducescatter


def _scattered(
    prefix: str, tensors: Sequence[torch.Tensor], name: str | None, reduction: ReductionArguments
) -> Sequence[torch.Tensor]:
    """Reduce into new tensors, and let autograd record it if a tensor requires a gradient."""
    if tracked(*tensors):
        result = HorovodReducescatter.apply(prefix, name, reduction, *tensors)  # type: ignore[no-untyped-call]  # torch's
    else:
        result = _start(prefix, tensors, name, reduction, awaited=True).result()
    return [result] if prefix == _SINGLE else result


@uncompiled
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors in one request, with the same errors. Differentiable.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device. Every member passes the same number of
            them in the same order.
        name, compression, op, process_set, prescale_factor, postscale_factor: as for :func:`reducescatter`.

    Returns:
        A list of new tensors in the order of ``tensors``: this rank's rows of each.
    """
    reduction = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    refuse_blocks(compression, "grouped_reducescatter")
    return compressed(compression, tensors, lambda sent: _scattered(_GROUP, sent, name, reduction))


@uncompiled
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce ``tensor`` over the ranks of ``process_set``, and return this rank's rows, as a new tensor. Differentiable.

    Waits for the result. Every member must call it, and run the backward pass. Rows are divided as by
    :func:`reducescatter_async`.

    Args:
        tensor, name, op, process_set, prescale_factor, postscale_factor: as for :func:`reducescatter_async`.
        compression: one of ``hvd.Compression``, or a class with the same methods. Compresses the tensor before it is sent. All
            members must use the same.

    Raises:
        TypeError, ValueError: as :func:`reducescatter_async`; or ``compression`` is not a compressor of single tensors.
        HorovodInternalError: as :func:`reducescatter_async`; or the ranks disagree.
    """
    reduction = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    refuse_blocks(compression, "reducescatter")
    return compressed(compression, [tensor], lambda sent: _scattered(_SINGLE, sent, name, reduction))[0]
