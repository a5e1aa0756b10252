"""reducescatter and its grouped form: reduce over the ranks; each rank keeps its rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.compression import refuse_blocks
from horovod._bindings.reductions import Average, ReductionArguments, Sum
from horovod.core.lifecycle.context import worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import shard_rows
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.errors import InvalidArgument, of_both_kinds
from horovod.tensorflow.graph.decorators import unconverted, with_gradient
from horovod.tensorflow.graph.names import Name, collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.allgather import allgather
from horovod.tensorflow.ops.allreduce import placed
from horovod.tensorflow.ops.arguments import checked_reduction, compressor
from horovod.tensorflow.tensors import any_rows, check_type

KIND = "HorovodReducescatter"
GROUPED = "HorovodGroupedReducescatter"


class Reducescatter(Collective, frozen=True):
    """Reduces tensors in one request. Outputs: this rank's rows of each reduced tensor."""

    kind: str
    name: str | None
    reduction: ReductionArguments

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        reduction = self.reduction
        members = reduction.process_set.process_set_id
        worker = worker_of(members, Operation.REDUCESCATTER)
        memory = memory_of(inputs, reduction)
        views = memory.read(inputs)
        rooms = []
        for each, tensor in zip(views, inputs, strict=True):
            if not each.shape:
                raise ValueError("Reducescatter does not support scalar inputs.")
            rows = shard_rows(each.shape[0], len(worker.ranks))[worker.index]
            rooms.append(memory.room(tensor, (rows, *each.shape[1:])))
        targets = [room.described() for room in rooms]
        handle = collectives.reducescatter(self.kind, self.name, views, targets, *reduction.positional, awaited)
        return handle, lambda: memory.results(handle, rooms)


def _submission(kind: str, name: str | None, tensors: Sequence[Any], reduction: ReductionArguments) -> Submission:
    specs = [tf.TensorSpec(any_rows(tensor), tensor.dtype) for tensor in tensors]
    return Submission(tensors, Reducescatter(kind, name, reduction), specs)


def _reduce(kind: str, name: Name, tensors: Sequence[Any], reduction: ReductionArguments) -> list[Any]:
    """The reduction. Its gradient gathers the rows of all ranks, times both factors and, for a Sum, the number of ranks."""

    @with_gradient
    def reduce(*tensors: Any) -> Any:
        outputs = run(name.node, [_submission(kind, name.negotiated, tensors, reduction)])[0]

        def gradient(*grads: Any) -> list[Any]:
            factor = (
                reduction.prescale
                * reduction.postscale
                * ((reduction.process_set.size() or 1) if reduction.op == Sum else 1)
            )
            scaled = [grad * tf.cast(factor, grad.dtype) for grad in grads]
            return [allgather(grad, process_set=reduction.process_set) for grad in scaled]

        return outputs, gradient

    return list(reduce(*tensors))


def _check(tensors: Sequence[Any], kind: str) -> None:
    for tensor in tensors:
        check_type(tensor, kind)
        if tensor.shape.rank == 0:
            raise InvalidArgument("Reducescatter does not support scalar inputs.")


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction of ``tensor``. Differentiable.

    Of n rows over s ranks, each rank keeps n // s, and the first n % s ranks keep one more. Every member of ``process_set``
    must call it with the same name, shape, dtype, op and factors. Errors are those of
    :func:`horovod.tensorflow.ops.allreduce.allreduce`, and InvalidArgumentError for a tensor without dimensions.

    Args:
        tensor: a tensor or variable of at least one dimension.
        device_dense: the device that the result is put on. It does not determine where the reduction runs.
        compression: compresses the tensor before it is sent.
        op: ``hvd.Average`` or ``hvd.Sum``.
        name, ignore_name_scope, process_set, prescale_factor, postscale_factor: as for
            :func:`horovod.tensorflow.ops.allreduce.allreduce`.

    Returns:
        A new tensor of the same dtype with this rank's rows.
    """
    reduction = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    compression = compressor(compression)
    with of_both_kinds():
        refuse_blocks(compression, "reducescatter")
    tensor = tf.convert_to_tensor(tensor)
    compressed, context = compression.compress(tensor)
    _check([compressed], KIND)
    names = collective_name(KIND, name, [tensor], ignore_name_scope)
    reduced = _reduce(KIND, names, [compressed], reduction)[0]
    return compression.decompress(placed(reduced, device_dense), context)


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """:func:`reducescatter` of several tensors in one request, with the same errors. Differentiable.

    Args:
        tensors: the tensors may differ in shape and dtype. Every member passes the same number of them in the same order.
        device_dense, compression, op, process_set, prescale_factor, postscale_factor: as for :func:`reducescatter`.

    Returns:
        A list in the order of ``tensors``: this rank's rows of each. An empty list is returned unchanged.
    """
    reduction = checked_reduction(op, None, prescale_factor, postscale_factor, process_set)
    compression = compressor(compression)
    with of_both_kinds():
        refuse_blocks(compression, "reducescatter")
    if not isinstance(tensors, list | tuple):
        tensors = list(tensors)
    if not tensors:
        return tensors
    originals = [tf.convert_to_tensor(tensor) for tensor in tensors]
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in originals], strict=True)
    _check(compressed, GROUPED)
    names = collective_name(GROUPED, None, originals)
    reduced = _reduce(GROUPED, names, compressed, reduction)
    return [
        compression.decompress(placed(tensor, device_dense), context)
        for tensor, context in zip(reduced, contexts, strict=True)
    ]
