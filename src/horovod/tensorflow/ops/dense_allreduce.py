"""The allreduce of dense tensors, without the arguments and conversions of the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.comm.reduction import ReduceOp
from horovod.core.process_set import ProcessSet
from horovod.core.submission import collectives
from horovod.core.submission.devices import Reduction
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.graph.decorators import with_gradient
from horovod.tensorflow.graph.names import Name, collective_name
from horovod.tensorflow.graph.operation import Outputs, Submission
from horovod.tensorflow.graph.run import run

KIND = "HorovodAllreduce"
GROUPED = "HorovodGroupedAllreduce"


def allreduce_submission(
    kind: str,
    name: str | None,
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Submission:
    """A submission that reduces tensors in one request. It has one output for each tensor."""

    def start(inputs: Sequence[Any], awaited: bool) -> tuple[Any, Outputs]:
        memory = memory_of(inputs, Reduction(op, prescale, postscale))
        views = memory.read(inputs)
        rooms = [memory.room(tensor, each.shape) for each, tensor in zip(views, inputs, strict=True)]
        handle = collectives.allreduce(
            kind,
            name,
            views,
            [room.described() for room in rooms],
            op,
            prescale,
            postscale,
            process_set.process_set_id,
            awaited,
        )
        return handle, lambda: memory.results(handle, rooms)

    return Submission(tensors, start, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])


def reduce_dense(
    kind: str,
    name: Name,
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> list[Any]:
    """Reduce dense tensors, eagerly or in a graph. Differentiable: the gradients are reduced in the same way."""

    @with_gradient
    def reduce(*tensors: Any) -> Any:
        outputs = run(
            name.node, [allreduce_submission(kind, name.negotiated, tensors, op, prescale, postscale, process_set)]
        )[0]

        def gradient(*grads: Any) -> list[Any]:
            again = collective_name(kind, None, list(grads))
            return reduce_dense(kind, again, grads, op, prescale, postscale, process_set)

        return outputs, gradient

    return list(reduce(*tensors))
