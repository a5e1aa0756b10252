"""allgather and its grouped form: concatenate the tensors of all ranks along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.datatypes import Array
from horovod.comm.spans import Vectors
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id
from horovod.tensorflow.device import Room, memory_of
from horovod.tensorflow.graph.decorators import unconverted, with_gradient
from horovod.tensorflow.graph.names import Name, collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.dense_allreduce import GROUPED as REDUCE
from horovod.tensorflow.ops.dense_allreduce import reduce_dense
from horovod.tensorflow.tensors import any_rows, check_type

KIND = "HorovodAllgather"
GROUPED = "HorovodGroupedAllgather"


class Allgather(Collective, frozen=True):
    """Gathers tensors in one request. Outputs: the gathered tensors, and each rank's rows as int32 (tensors, ranks)."""

    kind: str
    name: str | None
    process_set: ProcessSet

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        memory = memory_of(inputs)
        views = memory.read(inputs)
        rooms: dict[int, Room] = {}

        def allocate(index: int, rows: int) -> Array | Vectors:
            rooms[index] = memory.room(inputs[index], (rows, *views[index].shape[1:]))
            return rooms[index].vector

        handle = collectives.allgather(self.kind, self.name, views, allocate, self.process_set.process_set_id, awaited)

        def outputs() -> list[Any]:
            rows = tf.constant(handle.result, tf.int32)
            return [*memory.results(handle, [rooms[index] for index in range(len(inputs))]), rows]

        return handle, outputs


def allgather_submission(kind: str, name: str | None, tensors: Sequence[Any], process_set: ProcessSet) -> Submission:
    """A submission of :class:`Allgather`."""
    specs = [tf.TensorSpec(any_rows(tensor), tensor.dtype) for tensor in tensors]
    return Submission(
        tensors, Allgather(kind, name, process_set), [*specs, tf.TensorSpec([len(tensors), None], tf.int32)]
    )


def _gather(kind: str, name: Name, tensors: Sequence[Any], process_set: ProcessSet) -> list[Any]:
    @with_gradient
    def gather(*tensors: Any) -> Any:
        *outputs, rows = run(name.node, [allgather_submission(kind, name.negotiated, tensors, process_set)])[0]

        def gradient(*grads: Any) -> list[Any]:
            return own_rows(grads, rows, process_set)

        return outputs, gradient

    return list(gather(*tensors))


def own_rows(grads: Sequence[Any], rows: Any, process_set: ProcessSet) -> list[Any]:
    """This rank's rows of the gradients, averaged over the ranks. The adjoint is a sum, but scripts rely on the average.

    Args:
        grads: the gradients of the gathered tensors.
        rows: int32 (tensors, ranks): the number of rows of each tensor that each rank contributed.
    """
    dense = [tf.convert_to_tensor(grad) for grad in grads]
    averaged = reduce_dense(
        REDUCE, collective_name(REDUCE, None, dense), dense, ReductionArguments(process_set=process_set)
    )
    me = process_set.rank() or 0
    own = []
    for index, grad in enumerate(averaged):
        first = tf.reduce_sum(rows[index, :me])
        own.append(grad[first : first + rows[index, me]])
    return own


@unconverted
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the tensors of all members of ``process_set`` along dimension 0 in rank order. Differentiable.

    Every member must call it with the same name. Errors are those of :func:`horovod.tensorflow.ops.allreduce.allreduce`. A
    tensor without dimensions is an error on all ranks.

    The gradient of ``tensor`` is its rows of the *average* of the members' gradients of the result, not of their sum: a loss
    over gathered features gives ``1 / size`` of the gradient of one process with all features. With
    ``x = hvd.allgather(features)``, ``size * x - tf.stop_gradient((size - 1) * x)`` has the same values and the gradient of the
    sum.

    Args:
        tensor: a tensor or variable of at least one dimension. The first dimension may differ between ranks, and may be 0. The
            other dimensions and the dtype must agree.
        name, ignore_name_scope: as for :func:`horovod.tensorflow.ops.allreduce.allreduce`.
        process_set: the ranks that gather. This rank must be a member.

    Returns:
        A new tensor, whose first dimension is the sum of those of all members.
    """
    set_id(process_set)
    tensor = tf.convert_to_tensor(tensor)
    check_type(tensor, KIND)
    return _gather(KIND, collective_name(KIND, name, [tensor], ignore_name_scope), [tensor], process_set)[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """:func:`allgather` of several tensors in one request, with the same errors. Differentiable.

    Args:
        tensors: the tensors may differ in shape and dtype. Every member passes the same number of them in the same order.
        name, ignore_name_scope, process_set: as for :func:`allgather`.

    Returns:
        A list of new tensors in the order of ``tensors``. For an empty list it is empty, and nothing is communicated.
    """
    set_id(process_set)
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not converted:
        return converted
    for tensor in converted:
        check_type(tensor, GROUPED)
    return _gather(GROUPED, collective_name(GROUPED, name, converted, ignore_name_scope), converted, process_set)
