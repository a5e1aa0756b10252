"""reducescatter and its forms: reduce over the ranks, each keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.core import collectives
from horovod.core.context import running
from horovod.core.execution import shard_rows
from horovod.core.messages import Operation
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.torch.allgather import grouped_allgather
from horovod.torch.arguments import Average, Sum, reduction
from horovod.torch.compression import Compression, Compressor
from horovod.torch.handles import register, synchronize
from horovod.torch.tensors import check, view


def _submit(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    single: bool,
) -> int:
    chosen = reduction(op)
    lane = running().lane(process_set.process_set_id, Operation.REDUCESCATTER)
    outputs = []
    for tensor in tensors:
        check(tensor)
        if not tensor.dim():
            raise ValueError("Reducescatter does not support scalar inputs.")
        rows = shard_rows(tensor.shape[0], len(lane.ranks))[lane.index]
        outputs.append(torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype))
    handle = collectives.reducescatter(
        prefix,
        name,
        [view(tensor) for tensor in tensors],
        [view(output) for output in outputs],
        chosen,
        prescale_factor,
        postscale_factor,
        process_set.process_set_id,
    )
    result = outputs[0] if single else tuple(outputs)
    return register(handle, lambda _: result)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing ``tensor`` and keeping this rank's rows of the result; a handle.

    Of n rows over s ranks everybody keeps n // s, the first n % s ranks one more. ``op`` is hvd.Average or hvd.Sum.
    Shape, dtype, op and factors must agree. Errors as allreduce_async; ValueError for a tensor without dimensions.
    """
    return _submit("reducescatter", [tensor], name, op, process_set, prescale_factor, postscale_factor, single=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Like :func:`reducescatter_async` for several tensors that become ready together; its result is a tuple."""
    return _submit(
        "grouped_reducescatter", list(tensors), name, op, process_set, prescale_factor, postscale_factor, single=False
    )


class HorovodGroupedReducescatter(torch.autograd.Function):
    """Gradients: everybody's rows are gathered; for a Sum times the number of ranks, and times both factors."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        name, op, process_set, prescale, postscale, *tensors = arguments
        factor = prescale * postscale
        if reduction(op) == Sum:
            factor *= len(running().lane(process_set.process_set_id, Operation.REDUCESCATTER).ranks)
        ctx.factor = factor
        ctx.process_set = process_set
        if len(tensors) == 1:
            return (synchronize(reducescatter_async(tensors[0], name, op, process_set, prescale, postscale)),)
        return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered = grouped_allgather([(grad * ctx.factor).contiguous() for grad in grads], process_set=ctx.process_set)
        return None, None, None, None, None, *gathered


HorovodReducescatter = HorovodGroupedReducescatter


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors as one group. Differentiable."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = HorovodGroupedReducescatter.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        name, op, process_set, prescale_factor, postscale_factor, *compressed
    )
    return [compression.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]


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
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]
