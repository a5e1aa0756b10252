"""The request that carries one bucket of gradients, from a graph or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import ReductionArguments
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle
from horovod.core.submission.collectives import prepared_call, submit
from horovod.core.submission.prepared import device_of
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.training import in_graph

_IN_A_GRAPH = (
    "Ranks have gradients of different variables, and a graph cannot take zeros for gradients that it was built without. Make "
    "the variables part of every rank's loss (add 0.0 * tf.reduce_sum(output) of each head that this rank leaves out), pass "
    "unconnected_gradients=tf.UnconnectedGradients.ZERO to tape.gradient, or run the step eagerly (Keras: "
    "model.compile(..., run_eagerly=True))."
)


class ReduceGradients(Collective, frozen=True):
    """Reduces the gradients of one bucket in one request.

    Attributes:
        name: identifies the bucket on all ranks.
        labels: the names of the gradients, for errors.
        reduction: the reduction, its factors and its process set.
        line: the line of the user's code that reduces the gradients.
        alike: the gradients that exist, as in :class:`~horovod.core.negotiation.messages.Request`.
        lacking: the gradients that do not exist, for the error in a graph.
        at_start: the function to call first, as a number of :mod:`horovod.tensorflow.training.in_graph`; 0: none.
        numbers: the function that returns the numbers of the variables, which belong to ``alike``, too; 0: they have none, or
            are in ``alike``.
    """

    name: str
    labels: Sequence[str]
    reduction: ReductionArguments
    line: str
    alike: str = ""
    lacking: str = ""
    at_start: int = 0
    numbers: int = 0

    @property
    def mismatch(self) -> str:
        return f"{_IN_A_GRAPH} {self.lacking}"

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        in_graph.call(self.at_start)
        reduction = self.reduction
        memory = memory_of(inputs, reduction)
        views = memory.read(inputs)
        rooms = [memory.room(tensor, each.shape) for each, tensor in zip(views, inputs, strict=True)]
        call = prepared_call(
            Operation.ALLREDUCE,
            "",
            self.name,
            views,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            device=device_of(views),
            line=self.line,
            labels=self.labels,
            alike=self.alike + of_numbers(in_graph.call(self.numbers) or ""),
            compression=reduction.form,
        )
        targets = [room.described() for room in rooms]
        members = reduction.process_set.process_set_id
        handle = submit(members, call.request, views, targets, awaited=awaited, errors=call.errors(members))
        return handle, lambda: memory.results(handle, rooms)


def of_numbers(numbers: str) -> str:
    return f" of the variables that were broadcast as numbers {numbers}" if numbers else ""


def bucket_submission(
    name: str,
    labels: Sequence[str],
    tensors: Sequence[Any],
    arguments: ReductionArguments,
    line: str,
    alike: str,
    lacking: str,
    numbers: int,
    at_start: Callable[[], None] | None,
) -> Submission:
    """The submission of one bucket."""
    collective = ReduceGradients(name, labels, arguments, line, alike, lacking, in_graph.number(at_start), numbers)
    return Submission(tensors, collective, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
