"""allreduce and its forms: in place or not, asynchronous or not, one tensor or a group, dense or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.core import collectives
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.torch.allgather import allgather_async
from horovod.torch.arguments import Average, Sum, reduction, tracked
from horovod.torch.compression import Compression, Compressor
from horovod.torch.handles import register, synchronize
from horovod.torch.tensors import check, view


def _submit(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    result: Any,
    average: bool | None,
    name: str | None,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    chosen = reduction(op, average)
    inputs = [view(tensor) for tensor in tensors]
    targets = inputs if outputs is tensors else [view(output) for output in outputs]
    handle = collectives.allreduce(
        prefix,
        name,
        inputs,
        targets,
        chosen,
        prescale_factor,
        postscale_factor,
        process_set.process_set_id,
    )
    return register(handle, lambda _: result)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing ``tensor`` over the ranks of ``process_set``; a handle for :func:`synchronize` and :func:`poll`.

    Every member calls it with the same name, shape, dtype, op and factors. The tensor must not be changed until the handle
    is synchronised, which returns a new tensor of its shape.

    Raises:
        ValueError: sparse, not contiguous, an unsupported dtype, a name in flight, not a member.
        HorovodInternalError: not initialised, or the job has failed.
    """
    check(tensor)
    output = torch.empty_like(tensor)
    return _submit(
        "allreduce", [tensor], [output], output, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async`, in place: the result is written into ``tensor``."""
    tensors = [tensor]
    return _submit(
        "allreduce", tensors, tensors, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` in place and return it. No gradient flows through it."""
    result: torch.Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


class HorovodAllreduce(torch.autograd.Function):
    """The gradient of an allreduce is the allreduce of the gradient, with the same arguments."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        average, name, op, prescale, postscale, process_set = arguments
        ctx.arguments = (average, op, prescale, postscale, process_set)
        result: torch.Tensor = synchronize(allreduce_async(tensor, average, name, op, prescale, postscale, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        average, op, prescale, postscale, process_set = ctx.arguments
        grad = allreduce(
            grads[0].contiguous(),
            average=average,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return grad, None, None, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``postscale_factor * reduce(op, prescale_factor * tensor)`` over the ranks of ``process_set``, as a new tensor.

    Differentiable. The default op is ``hvd.Average``. Arguments and errors as :func:`allreduce_async`.
    """
    compressed, context = compression.compress(tensor)
    arguments = (compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    if not tracked(compressed):
        return compression.decompress(synchronize(allreduce_async(*arguments)), context)
    reduced = HorovodAllreduce.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return compression.decompress(reduced, context)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async` for several tensors that become ready together; its result is a tuple of new tensors."""
    tensors = list(tensors)
    for tensor in tensors:
        check(tensor)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return _submit(
        "grouped_allreduce",
        tensors,
        outputs,
        tuple(outputs),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`grouped_allreduce_async`, in place: its result is a tuple of the tensors themselves."""
    tensors = list(tensors)
    return _submit(
        "grouped_allreduce",
        tensors,
        tensors,
        tuple(tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place, as one group, and return them."""
    result: tuple[torch.Tensor, ...] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


class HorovodGroupedAllreduce(torch.autograd.Function):
    """The gradients of a grouped allreduce are the grouped allreduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        average, name, op, prescale, postscale, process_set, *tensors = arguments
        ctx.arguments = (average, op, prescale, postscale, process_set)
        handle = grouped_allreduce_async(tensors, average, name, op, prescale, postscale, process_set)
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        average, op, prescale, postscale, process_set = ctx.arguments
        reduced = grouped_allreduce(
            [grad.contiguous() for grad in grads],
            average=average,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return None, None, None, None, None, None, *reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one group, into new tensors. Differentiable."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        average, name, op, prescale_factor, postscale_factor, process_set, *compressed
    )
    return [compression.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start summing (or averaging) a sparse COO tensor over the ranks: everybody's indices and values are gathered.

    Returns:
        A function that waits and returns the sparse tensor, not coalesced.
    """
    chosen = reduction(op)
    if chosen not in (Sum, Average):
        raise ValueError(f"a sparse tensor can be reduced with hvd.Sum or hvd.Average, not hvd.{chosen.label}")
    tensor = tensor.coalesce() if not tensor.is_coalesced() else tensor
    indices_name, values_name = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices = allgather_async(tensor.indices().t().contiguous(), indices_name, process_set)
    values = allgather_async(tensor.values().contiguous(), values_name, process_set)

    def result() -> torch.Tensor:
        gathered: torch.Tensor = synchronize(values)
        where: torch.Tensor = synchronize(indices)
        if chosen == Average:
            gathered = gathered / (process_set.size() or 1)
        return torch.sparse_coo_tensor(where.t(), gathered, tensor.size())

    return result
