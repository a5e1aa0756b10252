"""What a worker thread does with one batch of decisions: gather the arrays, run the collective, hand out the results.

Runs in a turn of the worker thread, the same batch in the same order on every rank of the process set. A rank that has
joined takes part with a stand-in: it contributes what leaves the others' results as they are, and what it receives goes
nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from horovod.comm.adasum import adasum
from horovod.comm.base import Communicator
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, neutral, scale
from horovod.comm.spans import Spans, Vectors, joined, size_in_bytes
from horovod.core.coordination.messages import Decision, Operation, Request
from horovod.core.errors import HorovodInternalError
from horovod.core.submission.handle import Handle
from horovod.core.submission.tensor import Allocate


class Entry(msgspec.Struct, eq=False, gc=False):
    """One submitted request with its memory, from submission to completion.

    Attributes:
        inputs, outputs: one flat vector a tensor; outputs that only the decision can size are made by ``allocate``.
        since: when it was submitted (``time.monotonic``).
        owner: what holds the vectors' memory, where they do not themselves.
        held: its inputs are not there yet, so it has not been announced.
        error: with what it fails on this rank alone, once it is carried out; None where it succeeds.
    """

    request: Request
    inputs: Vectors
    outputs: Vectors
    allocate: Allocate | None
    handle: Handle
    since: float
    owner: object = None
    held: bool = False
    error: BaseException | None = None

    def size(self) -> int:
        """Bytes that this rank contributes, or receives where it contributes nothing."""
        return size_in_bytes(self.inputs or self.outputs)


Batch = Sequence[tuple[Decision, Entry | None]]
"""Decisions that are carried out together, each with this rank's entry; None where this rank has joined and has none."""


def size_of(batch: Batch) -> int:
    """Bytes that this rank contributes to a batch, or receives where it contributes nothing."""
    return sum(entry.size() for _, entry in batch if entry is not None)


def shard_rows(rows: int, size: int) -> list[int]:
    """How reducescatter deals ``rows`` rows to ``size`` ranks: evenly, the first ranks one more where it does not divide."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


def execute(communicator: Communicator, ranks: Sequence[int], batch: Batch) -> None:
    """Run the collective of one batch.

    Args:
        ranks: the group's global ranks, in group order.
        batch: of one operation (of compatible parameters, where there are several decisions).
    """
    operation = batch[0][0].operation
    if operation == Operation.BARRIER:
        communicator.barrier()
        return
    if operation == Operation.JOIN:
        for decision, entry in batch:
            if entry is not None:
                entry.handle.result = decision.last_joined
        return
    if operation in (Operation.ALLREDUCE, Operation.ADASUM):
        _allreduce(communicator, batch)
        return
    present = [(decision, entry or _stand_in(decision)) for decision, entry in batch]
    if operation == Operation.ALLGATHER:
        _allgather(communicator, present)
    elif operation == Operation.REDUCESCATTER:
        _reducescatter(communicator, [entry for _, entry in present])
    else:
        for decision, entry in present:
            if operation == Operation.BROADCAST:
                for array in entry.outputs:
                    communicator.broadcast(array, ranks.index(entry.request.root))
            else:
                _alltoall(communicator, decision, entry)


def _stand_in(decision: Decision) -> Entry:
    """What a rank that has joined takes part with."""
    request = decision.template
    assert request is not None
    specs = request.tensors
    if request.operation in (Operation.ALLREDUCE, Operation.ADASUM):
        arrays = [
            np.full(_elements(spec.shape), neutral(request.reduce_op, spec.data_type.numpy), spec.data_type.numpy)
            for spec in specs
        ]
        return Entry(request, arrays, arrays, None, Handle(), 0.0)
    if request.operation == Operation.BROADCAST:
        arrays = [np.empty(_elements(spec.shape), spec.data_type.numpy) for spec in specs]
        return Entry(request, [], arrays, None, Handle(), 0.0)

    def allocate(index: int, rows: int) -> Array:
        return np.empty(rows * _elements(specs[index].shape[1:]), specs[index].data_type.numpy)

    without_rows = msgspec.structs.replace(request, splits=(0,) * len(request.splits))
    return Entry(without_rows, [np.empty(0, spec.data_type.numpy) for spec in specs], [], allocate, Handle(), 0.0)


def output_of(entry: Entry, index: int, rows: int) -> Array:
    """Make output ``index`` of a request, with that first dimension.

    Where that fails, the request fails on this rank, and takes part with memory that nobody sees: the other ranks are in the
    collective by now, and can only end it together with this one.
    """
    assert entry.allocate is not None
    try:
        return entry.allocate(index, rows)
    except Exception as error:
        tensor = entry.request.tensors[index]
        entry.error = HorovodInternalError(
            f"the output of {tensor.name!r} ({rows} rows) could not be made on this rank: {type(error).__name__}: {error}"
        )
        return np.empty(rows * _elements(tensor.shape[1:]), tensor.data_type.numpy)


def scaling(request: Request, size: int) -> tuple[ReduceOp, float, float]:
    """The engine's operation and factors for a reduction over ``size`` ranks: Average is a Sum with 1/size in the postscale."""
    if request.reduce_op == ReduceOp.AVERAGE:
        return ReduceOp.SUM, request.prescale, request.postscale / size
    return request.reduce_op, request.prescale, request.postscale


def _allreduce(communicator: Communicator, batch: Batch) -> None:
    first, entry = batch[0]
    request = first.template if entry is None else entry.request
    assert request is not None
    op, prescale, postscale = scaling(request, communicator.size)
    # Scaled by the engine, what joined ranks contribute would not be neutral any more. Some have joined in all of a batch's
    # decisions, or in none.
    scale_here = first.template is not None and op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    entries = [entry or _stand_in(decision) for decision, entry in batch]
    inputs = outputs = joined([entry.inputs for entry in entries])
    if not all(entry.outputs is entry.inputs for entry in entries):
        outputs = joined([entry.outputs for entry in entries])
    if scale_here:
        inputs = [
            array if own is None else _scaled(array, prescale)
            for (_, own), entry in zip(batch, entries, strict=True)
            for array in entry.inputs
        ]
        prescale = 1.0
    for some_inputs, some_outputs in _by_type(inputs, outputs):
        if op == ReduceOp.ADASUM:
            adasum(communicator, list(some_inputs), list(some_outputs), prescale, postscale)
        else:
            communicator.allreduce(some_inputs, some_outputs, op, prescale, postscale)


def _scaled(array: Array, factor: float) -> Array:
    if factor != 1.0:
        array = array.copy()
        scale(array, factor)
    return array


def _by_type(inputs: Vectors, outputs: Vectors) -> Sequence[tuple[Vectors, Vectors]]:
    """Split a batch into vectors of one type each, in the order in which types first appear (the same on all ranks)."""
    if isinstance(inputs, Spans) or len({array.dtype for array in inputs}) == 1:
        return [(inputs, outputs)]
    split: dict[object, tuple[list[Array], list[Array]]] = {}
    for source, target in zip(inputs, outputs, strict=True):
        some_inputs, some_outputs = split.setdefault(source.dtype, ([], []))
        some_inputs.append(source)
        some_outputs.append(target)
    return list(split.values())


def _allgather(communicator: Communicator, batch: Sequence[tuple[Decision, Entry]]) -> None:
    inputs: list[Array] = []
    outputs: list[Array] = []
    counts: list[list[int]] = []
    for decision, entry in batch:
        entry.handle.result = decision.rows
        for index, (tensor, rows) in enumerate(zip(entry.request.tensors, decision.rows, strict=True)):
            row_elements = _elements(tensor.shape[1:])
            inputs.append(entry.inputs[index])
            outputs.append(output_of(entry, index, sum(rows)))
            counts.append([row_elements * rank_rows for rank_rows in rows])
    for dtype in dict.fromkeys(array.dtype for array in inputs):
        chosen = [index for index, array in enumerate(inputs) if array.dtype == dtype]
        communicator.allgather(
            [inputs[index] for index in chosen],
            [outputs[index] for index in chosen],
            [counts[index] for index in chosen],
        )


def _alltoall(communicator: Communicator, decision: Decision, entry: Entry) -> None:
    row_elements = _elements(entry.request.tensors[0].shape[1:])
    received = [row[communicator.rank] for row in decision.splits]
    target = output_of(entry, 0, sum(received))
    communicator.alltoall(
        entry.inputs[0],
        target,
        [split * row_elements for split in entry.request.splits],
        [split * row_elements for split in received],
    )
    entry.handle.result = received


def _reducescatter(communicator: Communicator, entries: Sequence[Entry]) -> None:
    inputs: list[Array] = []
    outputs: list[Array] = []
    counts: list[list[int]] = []
    for entry in entries:
        inputs += entry.inputs
        outputs += entry.outputs
        for tensor in entry.request.tensors:
            row_elements = _elements(tensor.shape[1:])
            counts.append([rows * row_elements for rows in shard_rows(tensor.shape[0], communicator.size)])
    op, prescale, postscale = scaling(entries[0].request, communicator.size)
    for dtype in dict.fromkeys(array.dtype for array in inputs):
        chosen = [index for index, array in enumerate(inputs) if array.dtype == dtype]
        communicator.reducescatter(
            [inputs[index] for index in chosen],
            [outputs[index] for index in chosen],
            [counts[index] for index in chosen],
            op,
            prescale,
            postscale,
        )


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for dimension in shape:
        total *= dimension
    return total
