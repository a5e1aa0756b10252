"""The allreduce of dense tensors, without the arguments and conversions of the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import ReductionArguments
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.graph.decorators import with_gradient
from horovod.tensorflow.graph.names import Name, collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run

KIND = "HorovodAllreduce"
GROUPED = "HorovodGroupedAllreduce"


class Allreduce(Collective, frozen=True):
    """Reduces tensors in one request."""

    kind: str
    name: str | None
    reduction: ReductionArguments

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        reduction = self.reduction
        memory = memory_of(inputs, reduction)
        views = memory.read(inputs)
        rooms = [memory.room(tensor, each.shape) for each, tensor in zip(views, inputs, strict=True)]
        targets = [room.described() for room in rooms]
        form = reduction.form
        handle = collectives.allreduce(self.kind, self.name, views, targets, *reduction.positional, awaited, form)
        return handle, lambda: memory.results(handle, rooms)


def allreduce_submission(
    kind: str, name: str | None, tensors: Sequence[Any], reduction: ReductionArguments
) -> Submission:
    """A submission that reduces tensors in one request. It has one output for each tensor."""
    return Submission(
        tensors, Allreduce(kind, name, reduction), [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    )


def reduce_dense(kind: str, name: Name, tensors: Sequence[Any], reduction: ReductionArguments) -> list[Any]:
    """Reduce dense tensors, eagerly or in a graph. Differentiable: the gradients are reduced in the same way."""

    @with_gradient
    def reduce(*tensors: Any) -> Any:
        outputs = run(name.node, [allreduce_submission(kind, name.negotiated, tensors, reduction)])[0]

        def gradient(*grads: Any) -> list[Any]:
            return reduce_dense(kind, collective_name(kind, None, list(grads)), grads, reduction)

        return outputs, gradient

    return list(reduce(*tensors))
