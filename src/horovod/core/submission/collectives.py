"""The interface for bindings: one function per collective, which checks the arguments and submits the request.

All members of the process set must call the same function with the same name. Each function says which arguments must agree.
Each returns at once with a :class:`~horovod.core.requests.handle.Handle`. The arrays must stay alive and unchanged until the
handle is done.

Common arguments:
    prefix, name: ``<prefix>.<name>`` identifies the collective within its process set; it must not be in flight there.
        Calls without a name are counted by prefix: the n-th calls of all members belong together. A call that is refused here,
        or that a signal handler interrupts before it is submitted, does not count.
    process_set_id: 0 for all ranks.
    awaited: the calling thread waits for the handle next, so no other thread is woken for a small collective. If the caller
        does not wait after all, the collective is carried out together with the next one of the process set.

Common errors:
    TypeError, ValueError: an argument is wrong, the name is in flight, or this rank is not a member of the process set. Only
        this call on this rank fails.
    HorovodInternalError: the job has failed or was shut down. If ranks disagree, the handle fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from horovod.comm.reduction import ReduceOp
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle.context import worker_of
from horovod.core.negotiation.messages import Operation, Request
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission.arguments import full_name, whole_numbers
from horovod.core.submission.prepared import device_of, submit, submit_arrays
from horovod.core.submission.requests import checked_root, factors, make_request, prepared_call
from horovod.observe.call_site import caller

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "join",
    "make_request",
    "prepared_call",
    "reducescatter",
    "submit",
    "submit_arrays",
    "wait_at_barrier",
]


def allreduce(
    prefix: str,
    name: str | None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set_id: int | None = 0,
    awaited: bool = False,
    compression: str = "",
) -> Handle:
    """``outputs[i] = postscale * reduce(op, prescale * inputs[i] of every rank)``.

    Shapes, types, ``op``, both factors and ``compression`` must agree on all ranks. An output may be its input. Several tensors
    form a group: they become ready together.
    """
    prescale, postscale = factors(prescale, postscale)
    call = prepared_call(
        Operation.ALLREDUCE,
        prefix,
        name,
        inputs,
        op,
        prescale,
        postscale,
        device=device_of(inputs),
        compression=compression,
    )
    return submit(process_set_id, call.request, inputs, outputs, awaited=awaited)


def allgather(
    prefix: str,
    name: str | None,
    inputs: Sequence[Tensor],
    allocate: Allocate,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Concatenate ``inputs[i]`` of every rank along the first dimension into the memory that ``allocate(i, rows)`` makes.

    Types and all dimensions but the first must agree.
    """
    call = prepared_call(Operation.ALLGATHER, prefix, name, inputs, device=device_of(inputs))
    return submit(process_set_id, call.request, inputs, allocate=allocate, awaited=awaited)


def broadcast(
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor],
    root: int,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Overwrite ``tensors`` on every rank with those of global rank ``root``, which must be a member of the set.

    Shapes, types and root must agree.
    """
    ranks = worker_of(process_set_id, Operation.BROADCAST).ranks
    root = checked_root(root, ranks, full_name(prefix, name) or prefix)
    call = prepared_call(Operation.BROADCAST, prefix, name, tensors, root=root, device=device_of(tensors))
    return submit(process_set_id, call.request, outputs=tensors, awaited=awaited)


def alltoall(
    prefix: str,
    name: str | None,
    source: Tensor,
    splits: Sequence[int] | None,
    allocate: Allocate,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Send ``splits[r]`` consecutive rows of ``source`` to set rank r; the received rows are concatenated by source rank.

    The output is made by ``allocate(0, rows)``; the handle's result is the list of received splits. Types and all
    dimensions but the first must agree. ``splits=None`` deals the rows evenly.
    """
    called = full_name(prefix, name) or prefix
    size = len(worker_of(process_set_id, Operation.ALLTOALL).ranks)
    rows = source.shape[0] if source.shape else 0
    splits = None if splits is None else whole_numbers(splits, "splits")
    if not splits:
        if rows % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers. "
                f"{called!r} has {rows} rows for {size} ranks; pass splits."
            )
        splits = [rows // size] * size
    if len(splits) != size:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers. {called!r}: {len(splits)} for {size}."
        )
    if any(split < 0 for split in splits):
        raise ValueError(f"Entries of splits must not be negative. {called!r}: {list(splits)}.")
    if sum(splits) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor. {called!r}: {sum(splits)} > {rows}."
        )
    sources = [source]
    call = prepared_call(Operation.ALLTOALL, prefix, name, sources, splits=splits, device=device_of(sources))
    return submit(process_set_id, call.request, sources, allocate=allocate, awaited=awaited)


def reducescatter(
    prefix: str,
    name: str | None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Reduce like :func:`allreduce`, then keep this rank's rows: :func:`horovod.core.requests.batch.shard_rows` deals them.

    ``outputs[i]`` has this rank's rows of ``inputs[i]``. ``op`` is Sum or Average.
    """
    called = full_name(prefix, name) or prefix
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(
            f"Reducescatter currently only supports AVERAGE and SUM. {called!r} asked for {op.label}."
        )
    if not all(tensor.shape for tensor in inputs):
        raise ValueError(f"Reducescatter does not support scalar inputs: {called!r}.")
    prescale, postscale = factors(prescale, postscale)
    call = prepared_call(
        Operation.REDUCESCATTER, prefix, name, inputs, op, prescale, postscale, device=device_of(inputs)
    )
    return submit(process_set_id, call.request, inputs, outputs, awaited=awaited)


def barrier(process_set_id: int | None = 0, awaited: bool = False) -> Handle:
    """Done when every member has called it. A process set has one barrier at a time, since all have one name."""
    request = Request(Operation.BARRIER, "barrier.noname", caller=caller(), transient=True)
    return submit(process_set_id, request, awaited=awaited)


_turns: dict[int | None, threading.Lock] = {}
"""By process set, held by the thread that waits at its barrier."""

os.register_at_fork(after_in_child=_turns.clear)


def wait_at_barrier(process_set_id: int | None = 0) -> None:
    """Return when every member has called it. Threads of one rank take turns: the n-th calls of all members belong together."""
    with _turns.setdefault(process_set_id, threading.Lock()):
        barrier(process_set_id, awaited=True).wait()


def join() -> Handle:
    """Done when every rank has called it; until then this rank takes part in others' reductions with zeros.

    The handle's result is the global rank that joined last.
    """
    return submit(0, Request(Operation.JOIN, "join.noname", caller=caller(), transient=True))
