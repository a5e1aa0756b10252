"""What every binding calls: one function per collective, which checks what can be checked here and submits the request.

All members of the process set must call the same function with the same name; which arguments must agree is said there.
Each returns at once with a :class:`~horovod.core.submission.handle.Handle`. Arrays must stay alive and untouched until
it is done.

Common arguments:
    prefix, name: ``<prefix>.<name>`` identifies the collective within its process set; it must not be in flight there.
        Without a name the calls with one prefix are counted, so the n-th of all members belong together; a call that is
        refused here does not count.
    process_set_id: 0 for all ranks.
    awaited: the caller waits for the handle next, on this thread. That saves waking another; who then does not wait leaves
        the collective to the next one of the process set.

Common errors:
    TypeError, ValueError: bad arguments, a name in flight, or not a member of the process set. What cannot be sent is found
        here, so it fails this call on this rank and nothing else.
    HorovodInternalError: the job has failed or was shut down. Disagreement with other ranks fails the handle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from horovod.comm.adasum import can_combine
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp, can_fold, can_scale
from horovod.comm.spans import Vectors, joined
from horovod.core.coordination.messages import HOST, Operation, Request, TensorSpec, encode
from horovod.core.errors import HorovodInternalError
from horovod.core.execution.batch import Entry
from horovod.core.lifecycle.context import running
from horovod.core.submission.arguments import full_name, real_number, whole_number, whole_numbers
from horovod.core.submission.devices import Ready, members_of, of_members
from horovod.core.submission.handle import Handle
from horovod.core.submission.tensor import Allocate, Tensor, Transfer
from horovod.observe.call_site import caller

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "join",
    "reducescatter",
    "submit",
]


_requests: dict[str, tuple[tuple[object, ...], Request]] = {}
"""Checked requests of repeated allreduces of one tensor, by name, with what they were made of."""

_REMEMBERED = 4096

LONGEST_REQUEST = 16 << 20
"""Bytes of one request as it is announced; a control message takes four times as many."""


def submit_arrays(
    process_set_id: int | None,
    request: Request,
    inputs: Vectors,
    outputs: Vectors,
    allocate: Allocate | None = None,
    awaited: bool = False,
    owner: object = None,
) -> Handle:
    """:func:`submit` of host memory, as one flat vector for each of the request's tensors, of its type and size.

    Args:
        owner: is held until the handle is done; what the vectors lie in, if they do not hold it themselves.
    """
    handle = Handle()
    worker = running().worker(process_set_id, request.operation)
    worker.submit(Entry(request, inputs, outputs, allocate, handle, time.monotonic(), owner), awaited=awaited)
    return handle


def submit(
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    allocate: Allocate | None = None,
    awaited: bool = False,
) -> Handle:
    """Submit a request that was made before and checked then; for callers that repeat one many times."""
    first = (inputs or outputs)[:1]
    if first and first[0].ready is not None:
        return _submit_on_device(process_set_id, request, inputs, outputs, allocate, first[0].ready)
    transfer = _transfer(inputs or outputs)
    arrays = [tensor.array for tensor in inputs]
    targets = arrays if outputs is inputs else [tensor.array for tensor in outputs]
    if transfer is None:
        return submit_arrays(process_set_id, request, arrays, targets, allocate, awaited)
    handle = Handle(transfer.end)
    worker = running().worker(process_set_id, request.operation)
    entry = Entry(request, arrays, targets, allocate, handle, time.monotonic())
    worker.submit(entry, held=True)
    try:
        transfer.begin(partial(worker.release, entry))
    except BaseException:
        worker.withdraw(entry)
        raise
    return handle


def _submit_on_device(
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    allocate: Allocate | None,
    ready: Ready,
) -> Handle:
    """:func:`submit` of device memory that an engine moves: all process sets' requests go to the coordinator of all ranks."""
    context = running()
    worker = context.worker(process_set_id, request.operation)
    members = members_of(worker.ranks, process_set_id)
    if members:
        request = of_members(request, members, worker.registration)
    sources: Vectors = _where(inputs)
    targets = sources if outputs is inputs else _where(outputs)
    handle = Handle()
    entry = Entry(request, sources, targets, allocate, handle, time.monotonic(), ready.held, ready=ready.marker)
    context.worker(0, request.operation).submit(entry)
    return handle


def _where(tensors: Sequence[Tensor]) -> Vectors:
    places = [tensor.place for tensor in tensors if tensor.place is not None]
    return joined(places) if places else []


def _transfer(tensors: Sequence[Tensor]) -> Transfer | None:
    return tensors[0].transfer if tensors else None


def _device(tensors: Sequence[Tensor]) -> str:
    if tensors and tensors[0].ready is not None:
        return tensors[0].ready.device
    transfer = _transfer(tensors)
    return HOST if transfer is None else transfer.device


def allreduce_request(
    name: str,
    tensors: Sequence[tuple[str, DataType, tuple[int, ...]]],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    line: str = "",
    transient: bool = False,
    device: str = HOST,
) -> Request:
    """The request of an allreduce of one or more tensors (name, type, shape), for :func:`submit`.

    Args:
        device: of the tensors' transfer, if they have one.

    Raises:
        TypeError, ValueError: the operation has no meaning for a tensor's type, or the request cannot be sent.
    """
    prescale, postscale = _factors(prescale, postscale)
    _check_reduction("Allreduce", [(each, data_type) for each, data_type, _ in tensors], op, prescale, postscale)
    specs = tuple(TensorSpec(each, data_type, shape) for each, data_type, shape in tensors)
    operation = Operation.ADASUM if op == ReduceOp.ADASUM else Operation.ALLREDUCE
    request = Request(operation, name, specs, op, prescale, postscale, device=device, caller=line, transient=transient)
    return _sendable(request)


def allreduce_call(
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set_id: int | None = 0,
    device: str = HOST,
) -> Request:
    """The request of one call of :func:`allreduce`, to be submitted later; of specs only type and shape count.

    Raises:
        ValueError: the operation has no meaning for a tensor's type; not a member of the process set.
    """
    given = full_name(prefix, name)
    prescale, postscale = _factors(prescale, postscale)
    _check_reduction(prefix, [(given or prefix, tensor.data_type) for tensor in tensors], op, prescale, postscale)
    called = given or _counted_name(prefix, process_set_id, Operation.ALLREDUCE)
    labelled = [(label, tensor.data_type, tensor.shape) for label, tensor in _labelled(called, tensors)]
    return allreduce_request(called, labelled, op, prescale, postscale, caller(), not given, device)


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
) -> Handle:
    """``outputs[i] = postscale * reduce(op, prescale * inputs[i] of every rank)``.

    Shapes, types, ``op`` and both factors must agree on all ranks. An output may be its input. Several tensors form a group:
    they become ready together.
    """
    device, called = _device(inputs), full_name(prefix, name)
    if len(inputs) != 1 or not called:
        request = allreduce_call(prefix, name, inputs, op, prescale, postscale, process_set_id, device)
        return submit(process_set_id, request, inputs, outputs, awaited=awaited)
    line = caller()
    prescale, postscale = _factors(prescale, postscale)
    key = (inputs[0].data_type, inputs[0].shape, op, prescale, postscale, line, device)
    known = _requests.get(called)
    if known is None or known[0] != key:
        tensors = [(called, inputs[0].data_type, inputs[0].shape)]
        request = allreduce_request(called, tensors, op, prescale, postscale, line, device=device)
        if len(_requests) >= _REMEMBERED:
            _requests.clear()
        known = _requests[called] = key, request
    return submit(process_set_id, known[1], inputs, outputs, awaited=awaited)


def allgather(
    prefix: str,
    name: str | None,
    inputs: Sequence[Tensor],
    allocate: Allocate,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Concatenate ``inputs[i]`` of every rank along the first dimension into what ``allocate(i, rows)`` makes.

    Types and all dimensions but the first must agree.
    """
    request = _request(Operation.ALLGATHER, prefix, name, process_set_id, inputs, device=_device(inputs))
    return submit(process_set_id, request, inputs, allocate=allocate, awaited=awaited)


def broadcast_call(
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    root: int,
    process_set_id: int | None = 0,
    device: str = HOST,
) -> Request:
    """The request of one call of :func:`broadcast`, to be submitted later; of specs only type and shape count.

    Raises:
        ValueError: the root or this rank is not a member of the process set.
    """
    called, root = full_name(prefix, name) or prefix, whole_number(root, "root_rank")
    worker = running().worker(process_set_id, Operation.BROADCAST)
    if root not in worker.ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root} for provided process set: {called!r} can come from "
            f"ranks {worker.ranks}"
        )
    return _request(Operation.BROADCAST, prefix, name, process_set_id, tensors, root=root, device=device)


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
    request = broadcast_call(prefix, name, tensors, root, process_set_id, _device(tensors))
    return submit(process_set_id, request, outputs=tensors, awaited=awaited)


def alltoall(
    prefix: str,
    name: str | None,
    source: Tensor,
    splits: Sequence[int] | None,
    allocate: Allocate,
    process_set_id: int | None = 0,
    awaited: bool = False,
) -> Handle:
    """Send ``splits[r]`` consecutive rows of ``source`` to set rank r; what arrives is concatenated by source rank.

    The output is made by ``allocate(0, rows)``; the handle's result is the list of received splits. Types and all
    dimensions but the first must agree. ``splits=None`` deals the rows evenly.
    """
    called = full_name(prefix, name) or prefix
    size = len(running().worker(process_set_id, Operation.ALLTOALL).ranks)
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
    request = _request(
        Operation.ALLTOALL, prefix, name, process_set_id, [source], splits=tuple(splits), device=_device([source])
    )
    return submit(process_set_id, request, [source], allocate=allocate, awaited=awaited)


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
    """Reduce like :func:`allreduce`, then keep this rank's rows: :func:`horovod.core.execution.batch.shard_rows` deals them.

    ``outputs[i]`` has this rank's rows of ``inputs[i]``. ``op`` is Sum or Average.
    """
    called = full_name(prefix, name) or prefix
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(
            f"Reducescatter currently only supports AVERAGE and SUM. {called!r} asked for {op.label}."
        )
    labelled = _labelled(called, inputs)
    for label, tensor in labelled:
        if not tensor.shape:
            raise ValueError(f"Reducescatter does not support scalar inputs: {label!r}.")
    prescale, postscale = _factors(prescale, postscale)
    _check_reduction("Reducescatter", [(each, tensor.data_type) for each, tensor in labelled], op, prescale, postscale)
    request = _request(
        Operation.REDUCESCATTER,
        prefix,
        name,
        process_set_id,
        inputs,
        reduce_op=op,
        prescale=prescale,
        postscale=postscale,
        device=_device(inputs),
    )
    return submit(process_set_id, request, inputs, outputs, awaited=awaited)


def barrier(process_set_id: int | None = 0, awaited: bool = False) -> Handle:
    """Done when every member has called it."""
    request = Request(Operation.BARRIER, "barrier.noname", caller=caller(), transient=True)
    return submit(process_set_id, request, awaited=awaited)


def join() -> Handle:
    """Done when every rank has called it; until then this rank takes part in others' reductions with zeros.

    The handle's result is the global rank that joined last.
    """
    return submit(0, Request(Operation.JOIN, "join.noname", caller=caller(), transient=True))


def _labelled(name: str, tensors: Sequence[Tensor | TensorSpec]) -> list[tuple[str, Tensor | TensorSpec]]:
    """Each tensor with its name: the request's own for one, ``<name>_<i>of<n>`` in a group."""
    if len(tensors) == 1:
        return [(name, tensors[0])]
    return [(f"{name}_{number}of{len(tensors)}", tensor) for number, tensor in enumerate(tensors, 1)]


def _counted_name(prefix: str, process_set_id: int | None, operation: Operation) -> str:
    """A name for a call without one. Counted per process set, since not every rank takes part in all of them."""
    context = running()
    context.worker(process_set_id, operation)  # refuses what would be refused later, before it counts
    return context.auto_name(prefix, process_set_id)


def _request(
    operation: Operation,
    prefix: str,
    name: str | None,
    process_set_id: int | None,
    tensors: Sequence[Tensor | TensorSpec],
    reduce_op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
    splits: tuple[int, ...] = (),
    device: str = HOST,
) -> Request:
    given = full_name(prefix, name)
    called = given or _counted_name(prefix, process_set_id, operation)
    specs = tuple(TensorSpec(label, each.data_type, each.shape) for label, each in _labelled(called, tensors))
    request = Request(
        operation,
        called,
        specs,
        reduce_op,
        prescale,
        postscale,
        root,
        splits,
        device,
        caller=caller(),
        transient=not given,
    )
    return _sendable(request)


def _factors(prescale: float, postscale: float) -> tuple[float, float]:
    return real_number(prescale, "prescale_factor"), real_number(postscale, "postscale_factor")


def _sendable(request: Request) -> Request:
    """The request, if it can be announced: a thread that serves all collectives must not be the one to find out.

    Raises:
        TypeError, ValueError: it has a value of no plain type, or is too long.
    """
    try:
        length = len(encode(request))
    except OverflowError as error:
        raise ValueError(f"{request.operation.name.capitalize()} of {request.name!r}: {error}") from None
    if length > LONGEST_REQUEST:
        raise ValueError(
            f"{request.operation.name.capitalize()} of {request.name[:100]!r}: to describe its {len(request.tensors)} tensors "
            f"takes {length} bytes; {LONGEST_REQUEST} can be sent. Use several smaller groups, or a shorter name."
        )
    return request


def _check_reduction(
    operation: str, tensors: Sequence[tuple[str, DataType]], op: ReduceOp, prescale: float, postscale: float
) -> None:
    scaled = op == ReduceOp.AVERAGE or prescale != 1.0 or postscale != 1.0
    for name, data_type in tensors:
        if op == ReduceOp.ADASUM and not can_combine(data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be reduced with Adasum; it takes "
                "floating-point types only"
            )
        if not can_fold(op, data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be reduced with {op.label}; use Sum or "
                "Average, or reduce their real and imaginary parts by themselves"
            )
        if scaled and not can_scale(data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be averaged or scaled; use Sum, Min or Max"
            )
