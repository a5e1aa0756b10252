"""broadcast of one rank's tensor to every rank, into a new tensor or in place."""

from __future__ import annotations

from typing import Any

import torch

from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id, whole_number
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.allreduce import allreduce
from horovod.torch.ops.handles import Started, register
from horovod.torch.tensors import check, empty_like, plain, tracked
from horovod.torch.uncompiled import uncompiled


@uncompiled
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to overwrite ``tensor`` on every member with that of global rank ``root_rank``, and return a handle.

    Every member must call it. Until :func:`synchronize` has returned, the script must not change the tensor, nor read it on
    ranks other than the root. Not differentiable.

    Args:
        tensor: a dense, contiguous tensor. Shape and dtype must agree. Dtypes and devices are those of
            :func:`allreduce_async`.
        root_rank: the global rank whose tensor is sent, the same on all members, of which it must be one.
        name: identifies the call. Calls without a name are matched by their order.
        process_set: the ranks that take part. This rank must be a member.

    Returns:
        A handle, for which :func:`synchronize` returns ``tensor`` itself.

    Raises:
        TypeError, ValueError, HorovodInternalError: as :func:`allreduce_async`; ValueError also if the root is not a member.
    """
    return register(_start(tensor, root_rank, name, process_set))


def _start(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, awaited: bool = False
) -> Started:
    """Start the broadcast.

    Args:
        awaited: the caller waits for the result next.
    """
    root, number = whole_number(root_rank, "root_rank"), set_id(process_set)
    memory = memory_of([tensor])
    tensors = memory.read([tensor]) if _is_root(root) else memory.write([tensor])
    handle = collectives.broadcast("broadcast", name, tensors, root, number, awaited)
    return Started(handle, memory, tensor)


def _is_root(root_rank: int) -> bool:
    return running().identity.rank == root_rank


@uncompiled
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` on every member with that of global rank ``root_rank``, and return it. Not differentiable.

    Waits for the result. Every member must call it. The arguments and errors are those of :func:`broadcast_async_`. It also
    raises HorovodInternalError if the ranks disagree.
    """
    result: torch.Tensor = _start(tensor, root_rank, name, process_set, awaited=True).result()
    return result


@uncompiled
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`broadcast_async_` into a new tensor, with the same arguments and errors. ``tensor`` is not changed.

    Returns:
        A handle, for which :func:`synchronize` returns the new tensor.
    """
    return register(_start(_copy(tensor, root_rank), root_rank, name, process_set))


def _copy(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """A new tensor like ``tensor``; on the root, a copy of it."""
    root_rank = whole_number(root_rank, "root_rank")
    check(tensor)
    new = empty_like(tensor)
    if _is_root(root_rank):
        new.copy_(tensor.detach())
    return new


@uncompiled
class HorovodBroadcast(torch.autograd.Function):
    """The gradient of a broadcast: the average of the ranks' gradients on the root, and zeros on other ranks."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank = whole_number(root_rank, "root_rank")
        ctx.process_set = process_set
        return broadcast_(_copy(tensor, root_rank), root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = allreduce(plain(grads[0]), process_set=ctx.process_set)
        ranks = ctx.process_set.ranks or []
        if ranks[ctx.process_set.rank() or 0] != ctx.root_rank:
            # Not a product with 0, which is NaN where the gradient is infinite. The zeros can be differentiated again.
            grad = grad.masked_fill(torch.ones((), dtype=torch.bool, device=grad.device), 0)
        return grad, None, None, None


@uncompiled
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of global rank ``root_rank``, as a new tensor on every member. Differentiable.

    Waits for the result. Every member must call it, and run the backward pass: the root gets the average of the members'
    gradients, other ranks get zeros. The arguments and errors are those of :func:`broadcast_async_`. It also raises
    HorovodInternalError if the ranks disagree.
    """
    if not tracked(tensor):
        return broadcast_(_copy(tensor, root_rank), root_rank, name, process_set)
    result: torch.Tensor = HorovodBroadcast.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        tensor, root_rank, name, process_set
    )
    return result
