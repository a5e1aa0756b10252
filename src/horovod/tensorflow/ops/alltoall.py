"""alltoall: every rank sends some of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
from horovod.tensorflow.ops.arguments import splits as checked_splits
from horovod.tensorflow.tensors import any_rows, check_type

KIND = "HorovodAlltoall"


class Alltoall(Collective, frozen=True):
    """Sends the rows of a tensor to the ranks, evenly or by splits, which are the second input.

    Outputs: the received rows, and the number of rows from each rank as int32 (ranks).
    """

    name: str | None
    process_set: ProcessSet

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        source, *given = inputs
        memory = memory_of([source])
        sent = memory.read([source])[0]
        rooms: list[Room] = []

        def allocate(_: int, rows: int) -> Array | Vectors:
            rooms.append(memory.room(source, (rows, *sent.shape[1:])))
            return rooms[0].vector

        rows = given[0].numpy().tolist() if given else None
        members = self.process_set.process_set_id
        handle = collectives.alltoall(KIND, self.name, sent, rows, allocate, members, awaited)
        return handle, lambda: [*memory.results(handle, rooms), tf.constant(handle.result, tf.int32)]


def _submission(name: str | None, tensor: Any, splits: Any, process_set: ProcessSet) -> Submission:
    outputs = [tf.TensorSpec(any_rows(tensor), tensor.dtype), tf.TensorSpec([None], tf.int32)]
    return Submission([tensor] if splits is None else [tensor, splits], Alltoall(name, process_set), outputs)


def _send(name: Name, tensor: Any, splits: Any, process_set: ProcessSet) -> tuple[Any, Any]:
    # The splits are an argument: in graphs of TensorFlow 1, a function with a custom gradient must not use other tensors that
    # depend on variables, and the splits of the gradient depend on whatever the rows depend on.
    @with_gradient
    def send(tensor: Any, *splits: Any) -> Any:
        submission = _submission(name.negotiated, tensor, splits[0] if splits else None, process_set)
        output, received = run(name.node, [submission])[0]

        def gradient(grad: Any, _: Any) -> list[Any]:
            """Send each row's gradient back to its source. Rows beyond the sum of the splits get gradients of 0."""
            returned, _ = _send(collective_name(KIND, None, [grad]), grad, received, process_set)
            missing = tf.shape(tensor)[0] - tf.shape(returned)[0]
            padding = tf.concat([[[0, missing]], tf.zeros([tf.rank(tensor) - 1, 2], tf.int32)], 0)
            padded = tf.pad(returned, padding)
            padded.set_shape(tensor.shape)  # which may be unknown
            return [padded, *[None for _ in splits]]

        return (output, received), gradient

    output, received = send(tensor) if splits is None else send(tensor, splits)
    return output, received


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` consecutive rows of ``tensor`` to rank r of ``process_set``, for each r. Differentiable.

    Every member must call it with the same name. Without splits the rows are divided evenly. The dtype and all dimensions but
    the first must agree.

    Args:
        tensor: a tensor or variable of at least one dimension.
        splits: an int32 tensor or a list, with one entry for each rank of the set. Rows beyond their sum are not sent.
        name, ignore_name_scope: as for :func:`horovod.tensorflow.ops.allreduce.allreduce`.
        process_set: the ranks that exchange rows. This rank must be a member.

    Returns:
        The received rows, concatenated by source rank. If ``splits`` is given, a tuple of these rows and an int32 tensor with
        the number of rows from each rank.

    Raises:
        tf.errors.InvalidArgumentError: splits that do not fit the rows, are not one-dimensional, or not int32. Otherwise as
            :func:`horovod.tensorflow.ops.allreduce.allreduce`.
    """
    set_id(process_set)
    tensor = tf.convert_to_tensor(tensor)
    check_type(tensor, KIND)
    chosen = None if splits is None else checked_splits(splits, tensor, process_set)
    names = collective_name(KIND, name, [tensor], ignore_name_scope)
    output, received = _send(names, tensor, chosen, process_set)
    return output if splits is None else (output, tf.stop_gradient(received))
