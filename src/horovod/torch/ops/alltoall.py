"""alltoall: every rank sends some of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.arguments import split_rows
from horovod.torch.ops.handles import Started, register
from horovod.torch.tensors import plain, tracked
from horovod.torch.uncompiled import uncompiled

Splits = torch.Tensor | Sequence[int] | None


def _start(
    tensor: torch.Tensor,
    splits: Splits,
    name: str | None,
    process_set: ProcessSet,
    awaited: bool = False,
    output_alone: bool = False,
) -> Started:
    """Start the alltoall.

    Args:
        awaited: the caller waits for the result next.
        output_alone: the result is the received rows, without their numbers.
    """
    rows, number = split_rows(splits), set_id(process_set)
    memory = memory_of([tensor])
    outputs: dict[int, torch.Tensor] = {}
    (source,) = memory.read([tensor])
    grow = memory.grow([tensor], outputs)
    handle = collectives.alltoall("alltoall", name, source, rows, grow, number, awaited)

    def result(done: Handle) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if output_alone:
            return outputs[0]
        device = splits.device if isinstance(splits, torch.Tensor) else None
        return outputs[0], torch.tensor(done.result, dtype=torch.int32, device=device)

    return Started(handle, memory, make=result)


@uncompiled
def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send ``splits[r]`` consecutive rows of ``tensor`` to rank r of ``process_set``, and return a handle.

    Every member must call it. The script must not change the tensor until :func:`synchronize` has returned. Not
    differentiable.

    Args:
        tensor: a dense, contiguous tensor of at least one dimension. The dtype and all dimensions but the first must agree.
            Dtypes and devices are those of :func:`allreduce_async`.
        splits: the number of rows for each rank of the set: a list, or an int32 tensor of one dimension. Rows beyond their sum
            are not sent. None: the rows are divided evenly, and their number must be a multiple of the size of the set.
        name: identifies the call. Calls without a name are matched by their order.
        process_set: the ranks that exchange rows. This rank must be a member.

    Returns:
        A handle. :func:`synchronize` returns ``(output, received_splits)`` for it: the received rows in the order of their
        source ranks, and the number of rows from each rank. ``received_splits`` is an int32 tensor on the device of
        ``splits``, or on the CPU if ``splits`` is not a tensor.

    Raises:
        TypeError, ValueError: splits that are not whole numbers, do not fit the rows, or are a tensor that is not
            one-dimensional or not int32. Otherwise as :func:`allreduce_async`.
    """
    return register(_start(tensor, splits, name, process_set))


@uncompiled
class HorovodAlltoall(torch.autograd.Function):
    """The gradient of an alltoall: each row's gradient is sent back to the rank that the row came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        output, received = _start(tensor, splits, name, process_set, awaited=True).result()
        ctx.received = received.tolist()
        ctx.rows = tensor.shape[0]
        ctx.process_set = process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, _ = alltoall(plain(grads[0]), ctx.received, process_set=ctx.process_set)
        if grad.shape[0] < ctx.rows:  # rows beyond the sum of the splits were not sent
            grad = torch.cat([grad, grad.new_zeros((ctx.rows - grad.shape[0], *grad.shape[1:]))])
        return grad, None, None, None


@uncompiled
def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send ``splits[r]`` consecutive rows of ``tensor`` to rank r of ``process_set``. Waits for the result. Differentiable.

    Every member must call it, and run the backward pass, which sends each row's gradient back to the rank that the row came
    from. The arguments and errors are those of :func:`alltoall_async`. It also raises HorovodInternalError if the ranks
    disagree.

    Returns:
        The received rows in the order of their source ranks, as a new tensor. If ``splits`` is given, a tuple of this tensor
        and an int32 tensor with the number of rows from each rank.
    """
    if not tracked(tensor):
        return _start(tensor, splits, name, process_set, awaited=True, output_alone=splits is None).result()
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]  # torch's
    return output if splits is None else (output, received)
