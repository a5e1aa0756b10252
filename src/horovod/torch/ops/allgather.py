"""allgather and its forms: concatenate the tensors of all ranks along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.allreduce import grouped_allreduce
from horovod.torch.ops.handles import Started, register
from horovod.torch.tensors import plain, tracked
from horovod.torch.uncompiled import uncompiled

Rows = Sequence[Sequence[int]]
"""By tensor, the number of rows from each rank."""

_SINGLE, _GROUP = "allgather", "grouped_allgather"


def _start(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    with_rows: bool = False,
    awaited: bool = False,
) -> Started:
    """Start the allgather. The result of a group is a tuple.

    Args:
        with_rows: the result comes with the number of rows from each rank.
        awaited: the caller waits for the result next.
    """
    number = set_id(process_set)
    memory = memory_of(tensors)
    outputs: dict[int, torch.Tensor] = {}
    inputs = memory.read(tensors)
    grow = memory.grow(tensors, outputs)
    handle = collectives.allgather(prefix, name, inputs, grow, number, awaited)

    def result(done: Handle) -> Any:
        gathered = outputs[0] if prefix == _SINGLE else tuple(outputs[index] for index in range(len(tensors)))
        return (gathered, done.result) if with_rows else gathered

    return Started(handle, memory, make=result)


@uncompiled
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to concatenate ``tensor`` of all members of ``process_set`` along dimension 0, and return a handle.

    Every member must call it. The script must not change the tensor until :func:`synchronize` has returned. Not
    differentiable.

    Args:
        tensor: a dense, contiguous tensor of at least one dimension. The first dimension may differ between ranks, and may be
            0. The other dimensions and the dtype must agree. Dtypes and devices are those of :func:`allreduce_async`.
        name: identifies the call. Calls without a name are matched by their order.
        process_set: the ranks that gather. This rank must be a member.

    Returns:
        A handle. :func:`synchronize` returns a new tensor for it: the rows of all members, in rank order.

    Raises:
        TypeError, ValueError, HorovodInternalError: as :func:`allreduce_async`. A tensor without dimensions is an error on
            every rank.
    """
    return register(_start(_SINGLE, [tensor], name, process_set))


@uncompiled
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`allgather_async` of several tensors in one request, with the same errors.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device. Every member passes the same number of
            them in the same order.
        name, process_set: as for :func:`allgather_async`.

    Returns:
        A handle, for which :func:`synchronize` returns a tuple of new tensors in the order of ``tensors``.
    """
    return register(_start(_GROUP, list(tensors), name, process_set))


def _own_slices(grads: Sequence[torch.Tensor], rows: Rows, process_set: ProcessSet) -> list[torch.Tensor]:
    """This rank's rows of the gradients, averaged over the ranks. The adjoint is a sum, but scripts rely on the average."""
    averaged = grouped_allreduce([plain(grad) for grad in grads], process_set=process_set)
    me = process_set.rank() or 0
    return [grad[sum(of[:me]) : sum(of[: me + 1])] for grad, of in zip(averaged, rows, strict=True)]


@uncompiled
class HorovodAllgather(torch.autograd.Function):
    """The gradients of an allgather, or of a group: this rank's rows of the ranks' average."""

    @staticmethod
    def forward(ctx: Any, prefix: str, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        gathered, ctx.rows = _start(prefix, tensors, name, process_set, with_rows=True, awaited=True).result()
        ctx.process_set = process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_own_slices(grads, ctx.rows, ctx.process_set)


HorovodGroupedAllgather = HorovodAllgather


def _gathered(prefix: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet) -> Any:
    """Gather into new tensors, and let autograd record it if a tensor requires a gradient."""
    if tracked(*tensors):
        return HorovodAllgather.apply(prefix, name, process_set, *tensors)  # type: ignore[no-untyped-call]  # torch's
    return _start(prefix, tensors, name, process_set, awaited=True).result()


@uncompiled
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all members along dimension 0 in rank order. Differentiable.

    The gradient of ``tensor`` is its rows of the *average* of the members' gradients of the result, not of their sum. So a loss
    over gathered features gives ``1 / size`` of the gradient that ``torch.distributed.nn.functional.all_gather`` gives. With
    ``x = hvd.allgather(features)``, ``size * x - ((size - 1) * x).detach()`` has the same values and the gradient of the sum.

    Waits for the result. Every member must call it, and run the backward pass. The arguments and errors are those of
    :func:`allgather_async`. It also raises HorovodInternalError if the ranks disagree.

    Returns:
        A new tensor on the same device, whose first dimension is the sum of those of all members.
    """
    result: torch.Tensor = _gathered(_SINGLE, [tensor], name, process_set)
    return result


@uncompiled
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """:func:`allgather` of several tensors in one request, with the same errors. Differentiable.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device. Every member passes the same number of
            them in the same order.
        name, process_set: as for :func:`allgather_async`.

    Returns:
        A tuple of new tensors in the order of ``tensors``.
    """
    result: tuple[torch.Tensor, ...] = _gathered(_GROUP, list(tensors), name, process_set)
    return result
