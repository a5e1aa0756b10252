"""allgather and its forms: tensors of all ranks, one after another along the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.comm.datatypes import Array
from horovod.core import collectives
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.torch.arguments import tracked
from horovod.torch.handles import register, synchronize
from horovod.torch.tensors import flat_array, view

Rows = Sequence[Sequence[int]]
"""By tensor, how many rows came from each rank."""


def _submit(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[list[torch.Tensor], Rows], Any],
) -> int:
    """Start to gather; ``result`` makes of the outputs, and of where they came from, what the handle's waiter gets."""
    inputs = [view(tensor) for tensor in tensors]
    outputs: dict[int, torch.Tensor] = {}

    def allocate(index: int, rows: int) -> Array:
        output = outputs[index] = torch.empty((rows, *tensors[index].shape[1:]), dtype=tensors[index].dtype)
        return flat_array(output)

    handle = collectives.allgather(prefix, name, inputs, allocate, process_set.process_set_id)
    return register(handle, lambda done: result([outputs[index] for index in range(len(tensors))], done.result))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start concatenating ``tensor`` of all members along dimension 0; a handle.

    First dimensions may differ between ranks, 0 included; the others and the dtype must agree. Errors as allreduce_async;
    a tensor without dimensions fails on every rank.
    """
    return _submit("allgather", [tensor], name, process_set, lambda outputs, _: outputs[0])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like :func:`allgather_async` for several tensors that become ready together; its result is a tuple."""
    return _submit("grouped_allgather", list(tensors), name, process_set, lambda outputs, _: tuple(outputs))


def _own_slices(grads: Sequence[torch.Tensor], rows: Rows, process_set: ProcessSet) -> list[torch.Tensor]:
    """The gradient rule: average over the ranks, then this rank's rows. (Not a concatenation's adjoint; scripts rely on it.)"""
    from horovod.torch.allreduce import grouped_allreduce  # allreduce's sparse form needs allgather

    averaged = grouped_allreduce([grad.contiguous() for grad in grads], process_set=process_set)
    me = process_set.rank() or 0
    return [grad[sum(of[:me]) : sum(of[: me + 1])] for grad, of in zip(averaged, rows, strict=True)]


class HorovodAllgather(torch.autograd.Function):
    """Gradient: averaged over the ranks, then this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        handle = _submit("allgather", [tensor], name, process_set, lambda outputs, rows: (outputs[0], rows))
        result: torch.Tensor
        result, ctx.rows = synchronize(handle)
        ctx.process_set = process_set
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_slices([grads[0]], ctx.rows, ctx.process_set)[0], None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all members, one after another along dimension 0 in rank order. Differentiable."""
    if not tracked(tensor):
        untracked: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return untracked
    result: torch.Tensor = HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]  # torch
    return result


class HorovodGroupedAllgather(torch.autograd.Function):
    """Gradients as :class:`HorovodAllgather`, in one group."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        handle = _submit("grouped_allgather", tensors, name, process_set, lambda *found: found)
        outputs, ctx.rows = synchronize(handle)
        ctx.process_set = process_set
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *_own_slices(grads, ctx.rows, ctx.process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """:func:`allgather` of several tensors as one group. Differentiable."""
    result: tuple[torch.Tensor, ...] = HorovodGroupedAllgather.apply(  # type: ignore[no-untyped-call]  # torch
        name, process_set, *tensors
    )
    return result
