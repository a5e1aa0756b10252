"""Carries out one batch of decisions: gathers the arrays, runs the collective, hands out the results.

The worker thread calls it. Every rank of the process set carries out the same batches in the same order. A rank that has joined
contributes values that do not change the others' results, and discards its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import msgspec
import numpy as np

from horovod.comm.adasum import adasum
from horovod.comm.base import Communicator, Completion
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import FORMATS, BlockFormat, can_compress
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp, neutral, scale, without_average
from horovod.comm.spans import (
    Spans,
    Vectors,
    arrays_of,
    dtype_of,
    host_vector,
    joined,
    joined_spans,
    size_in_bytes,
    sizes_of,
    vector_of,
)
from horovod.core.errors import EngineFailureError, MismatchError
from horovod.core.negotiation.messages import Decision, Operation, Request, TensorSpec
from horovod.core.requests.compression_trial import try_compression
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate


class Entry(msgspec.Struct, eq=False, gc=False):
    """One submitted request with its memory, from submission to completion.

    Attributes:
        inputs, outputs: one flat vector a tensor; those of an alltoall may be one for each rank. ``allocate`` makes outputs
            whose size only the decision determines.
        since: when it was submitted (``time.monotonic``).
        owner: the object that keeps the vectors' memory alive, if they do not.
        held: its inputs are not ready yet, so it has not been announced.
        error: the error with which it fails on this rank alone, once it is carried out; None if it succeeds.
        ready: for vectors on a device, the marker that must be reached before they may be accessed; None in host memory.
        errors: of a compressed reduction with error feedback, by tensor what earlier ones have rounded away on this rank;
            else empty.
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
    ready: Any = None
    errors: Errors = ()

    def __repr__(self) -> str:
        return f"Entry({self.request.name!r}, {self.size()} bytes, {self.handle!r})"

    def size(self) -> int:
        """The bytes that this rank contributes, or that it receives if it contributes nothing."""
        return size_in_bytes(self.inputs or self.outputs)


Batch = Sequence[tuple[Decision, Entry | None]]
"""Decisions that are carried out together, each with this rank's entry; None if this rank has joined and has none."""


def size_of(batch: Batch) -> int:
    """The bytes of this rank's tensors in a batch."""
    return sum([entry.request.nbytes for _, entry in batch if entry is not None])


def shard_rows(rows: int, size: int) -> list[int]:
    """The rows that each of ``size`` ranks gets of ``rows`` rows in a reducescatter: equal numbers, and one more for the first
    ranks if they cannot be divided evenly."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


def execute(
    communicator: Communicator, ranks: Sequence[int], batch: Batch, held: list[object] | None = None
) -> Completion:
    """Run the collective of one batch.

    Args:
        ranks: the group's global ranks, in group order.
        batch: decisions on one operation, with compatible parameters.
        held: gets the objects that are made here and must live until the batch is complete.

    Returns:
        None if the batch is complete. Otherwise the event of its last collective: one communicator's collectives complete in
        the order of the calls.
    """
    operation = batch[0][0].operation
    for _, entry in batch:
        if entry is not None and entry.ready is not None:
            communicator.follow(entry.ready)
    if operation == Operation.BARRIER:
        return communicator.barrier()
    if operation == Operation.JOIN:
        for decision, entry in batch:
            if entry is not None:
                entry.handle.result = decision.last_joined
        return None
    if operation in (Operation.ALLREDUCE, Operation.ADASUM):
        return _allreduce(communicator, batch, held)
    present = [(decision, entry or _stand_in(communicator, decision)) for decision, entry in batch]
    if held is not None:
        held.append(present)
    if operation == Operation.ALLGATHER:
        return _allgather(communicator, present)
    if operation == Operation.REDUCESCATTER:
        return _reducescatter(communicator, [entry for _, entry in present])
    completion: Completion = None
    for decision, entry in present:
        if operation == Operation.BROADCAST:
            completion = communicator.broadcast(entry.outputs, ranks.index(entry.request.root))
        else:
            completion = _alltoall(communicator, decision, entry)
    return completion


def _stand_in(communicator: Communicator, decision: Decision) -> Entry:
    """The entry of a rank that has joined. Its owner are the vectors that were made for it."""
    request = decision.template
    assert request is not None
    specs = request.tensors
    made: list[Vectors] = []

    def new(spec: TensorSpec, length: int, value: Any = None) -> Vectors:
        made.append(communicator.allocate(spec.data_type.numpy, length, value))
        return made[-1]

    if request.operation in (Operation.ALLREDUCE, Operation.ADASUM):
        op = request.reduce_op
        vectors = joined([new(spec, _elements(spec.shape), neutral(op, spec.data_type.numpy)) for spec in specs])
        return Entry(request, vectors, vectors, None, Handle(), 0.0, made)
    if request.operation == Operation.BROADCAST:
        vectors = joined([new(spec, _elements(spec.shape)) for spec in specs])
        return Entry(request, [], vectors, None, Handle(), 0.0, made)

    def allocate(index: int, rows: int) -> Vectors:
        return new(specs[index], rows * _elements(specs[index].shape[1:]))

    without_rows = msgspec.structs.replace(request, splits=(0,) * len(request.splits))
    nothing = joined([new(spec, 0) for spec in specs])
    return Entry(without_rows, nothing, [], allocate, Handle(), 0.0, made)


def output_of(
    entry: Entry,
    index: int,
    rows: int,
    spare: Callable[[np.dtype[Any], int], Vectors] = host_vector,
    received: Sequence[int] = (),
) -> Vectors:
    """Make output ``index`` of a request, with that first dimension.

    If that fails, the request fails on this rank, but takes part with other memory (``spare``): the other ranks are already in
    the collective, and cannot complete it without this one.

    Args:
        received: of an alltoall: by rank, the number of elements from it. A vector for each rank must have that size.
    """
    assert entry.allocate is not None
    try:
        made = entry.allocate(index, rows)
        vectors = [made] if isinstance(made, np.ndarray) else made
        if received and len(vectors) > 1:
            check_received(entry.request.name, received, sizes_of(vectors))
        return vectors
    except Exception as error:
        tensor = entry.request.tensors[index]
        entry.error = (
            error
            if isinstance(error, MismatchError)
            else EngineFailureError(
                f"the output of {tensor.name!r} ({rows} rows) could not be made on this rank: {type(error).__name__}: {error}"
            )
        )
        made = spare(tensor.data_type.numpy, rows * _elements(tensor.shape[1:]))
        entry.owner = (entry.owner, made)
        return made


def check_received(what: str, received: Sequence[int], room: Sequence[int]) -> None:
    """Raise MismatchError if an alltoall brings other numbers of elements from the ranks than the outputs have room for.

    Args:
        what: the call, for the error.
        received, room: by rank.
    """
    for rank, (sent, expected) in enumerate(zip(received, room, strict=True)):
        if sent != expected:
            text = (
                f"{what}: rank {rank} of the group sent {sent} elements, and the output has room for {expected} from it"
            )
            raise MismatchError(text, reason=text)


def _allreduce(communicator: Communicator, batch: Batch, held: list[object] | None) -> Completion:
    first, entry = batch[0]
    request = first.template if entry is None else entry.request
    assert request is not None
    op, prescale, postscale = without_average(request.reduce_op, request.prescale, request.postscale, communicator.size)
    # Scaled by the engine, what joined ranks contribute would not be neutral any more. Some have joined in all of a batch's
    # decisions, or in none.
    unlike_sum = op != ReduceOp.SUM
    scale_here = first.template is not None and unlike_sum and prescale != 1.0
    entries = [own or _stand_in(communicator, decision) for decision, own in batch]
    parts = [entry.inputs for entry in entries]
    targets = [entry.outputs for entry in entries]
    in_place = not scale_here and all(map(is_, parts, targets))
    if scale_here:
        parts = [
            part if own is None else [_scaled(array, prescale) for array in part]
            for part, (_, own) in zip(parts, batch, strict=True)
        ]
    if held is not None:
        held.append(entries)
    if scale_here:
        prescale = 1.0
    completion: Completion = None
    if request.compression and communicator.compresses:
        return _compressed_allreduce(communicator, entries, FORMATS[request.compression], prescale, postscale)
    for inputs, outputs in _by_type(parts, parts if in_place else targets):
        if op == ReduceOp.ADASUM:
            adasum(communicator, arrays_of(inputs), arrays_of(outputs), prescale, postscale)
        else:
            completion = communicator.allreduce(inputs, outputs, op, prescale, postscale)
    return completion


def _compressed_allreduce(
    communicator: Communicator, entries: Sequence[Entry], form: BlockFormat, prescale: float, postscale: float
) -> Completion:
    """Sum the vectors of each type, those that are compressed and the others apart. Which ones are depends on nothing but the
    tensor, so it is the same on all ranks and in all batches."""
    groups: dict[tuple[DataType, bool], tuple[list[Vectors], list[Vectors], list[Array | None]]] = {}
    for entry in entries:
        for index, tensor in enumerate(entry.request.tensors):
            key = tensor.data_type, can_compress(tensor.data_type, _elements(tensor.shape))
            inputs, outputs, errors = groups.setdefault(key, ([], [], []))
            inputs.append(vector_of(entry.inputs, index))
            outputs.append(vector_of(entry.outputs, index))
            errors.append(entry.errors[index] if entry.errors else None)
    completion: Completion = None
    for (_, compressed), (inputs, outputs, errors) in groups.items():
        sources, targets = joined(inputs), joined(outputs)
        if compressed:
            try_compression(communicator, sources, form)
            completion = communicator.allreduce_compressed(sources, targets, prescale, postscale, form, errors)
        else:
            completion = communicator.allreduce(sources, targets, ReduceOp.SUM, prescale, postscale)
    return completion


def _scaled(array: Array, factor: float) -> Array:
    if factor != 1.0:
        array = array.copy()
        scale(array, factor)
    return array


def _by_type(inputs: Sequence[Vectors], outputs: Sequence[Vectors]) -> Sequence[tuple[Vectors, Vectors]]:
    """Join the vectors of each type, in the order in which types first appear (the same on all ranks)."""
    if len(inputs) == 1 and isinstance(inputs[0], Spans):
        return [(inputs[0], outputs[0])]
    together: Vectors | None = joined_spans(inputs)
    if together is None and len({part.layout.dtype for part in inputs if isinstance(part, Spans)}) < 2:
        arrays = joined(inputs)
        together = arrays if len({array.dtype for array in arrays}) == 1 else None
    if together is not None:
        return [(together, together if outputs is inputs else joined(outputs))]
    split: dict[object, tuple[list[Vectors], list[Vectors]]] = {}
    for sources, targets in zip(inputs, outputs, strict=True):
        for index in range(len(sources)):
            source = vector_of(sources, index)
            some_inputs, some_outputs = split.setdefault(dtype_of(source), ([], []))
            some_inputs.append(source)
            some_outputs.append(vector_of(targets, index))
    return [(joined(some_inputs), joined(some_outputs)) for some_inputs, some_outputs in split.values()]


def _by_type_with_counts(
    inputs: Sequence[Vectors], outputs: Sequence[Vectors], counts: Sequence[Sequence[int]]
) -> Iterator[tuple[Vectors, Vectors, Sequence[Sequence[int]]]]:
    """Join the single vectors of each type, and their counts."""
    if len(inputs) == 1:
        yield inputs[0], outputs[0], counts
        return
    for dtype in dict.fromkeys(dtype_of(vector) for vector in inputs):
        chosen = [index for index, vector in enumerate(inputs) if dtype_of(vector) == dtype]
        yield (
            joined([inputs[index] for index in chosen]),
            joined([outputs[index] for index in chosen]),
            [counts[index] for index in chosen],
        )


def _allgather(communicator: Communicator, batch: Sequence[tuple[Decision, Entry]]) -> Completion:
    inputs: list[Vectors] = []
    outputs: list[Vectors] = []
    counts: list[list[int]] = []
    for decision, entry in batch:
        entry.handle.result = decision.rows
        for index, (tensor, rows) in enumerate(zip(entry.request.tensors, decision.rows, strict=True)):
            row_elements = _elements(tensor.shape[1:])
            inputs.append(vector_of(entry.inputs, index))
            outputs.append(output_of(entry, index, sum(rows), communicator.allocate))
            counts.append([row_elements * rank_rows for rank_rows in rows])
    completion: Completion = None
    for some in _by_type_with_counts(inputs, outputs, counts):
        completion = communicator.allgather(*some)
    return completion


def _alltoall(communicator: Communicator, decision: Decision, entry: Entry) -> Completion:
    row_elements = _elements(entry.request.tensors[0].shape[1:])
    sent, received = ([rows * row_elements for rows in each] for each in (entry.request.splits, decision.received))
    target = output_of(entry, 0, sum(decision.received), communicator.allocate, received)
    entry.handle.result = list(decision.received)
    return communicator.alltoall(entry.inputs, target, sent, received, decision.longest * row_elements)


def _reducescatter(communicator: Communicator, entries: Sequence[Entry]) -> Completion:
    inputs: list[Vectors] = []
    outputs: list[Vectors] = []
    counts: list[list[int]] = []
    for entry in entries:
        for index, tensor in enumerate(entry.request.tensors):
            row_elements = _elements(tensor.shape[1:])
            inputs.append(vector_of(entry.inputs, index))
            outputs.append(vector_of(entry.outputs, index))
            counts.append([rows * row_elements for rows in shard_rows(tensor.shape[0], communicator.size)])
    request = entries[0].request
    op, prescale, postscale = without_average(request.reduce_op, request.prescale, request.postscale, communicator.size)
    completion: Completion = None
    for some in _by_type_with_counts(inputs, outputs, counts):
        completion = communicator.reducescatter(*some, op, prescale, postscale)
    return completion


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for dimension in shape:
        total *= dimension
    return total
