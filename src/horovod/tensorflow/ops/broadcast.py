"""broadcast of one rank's tensor to every rank, and of variables in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.ref_variable import RefVariable

from horovod.core.lifecycle.context import keeps_own
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.graph.decorators import unconverted, with_gradient
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.allreduce import allreduce
from horovod.tensorflow.ops.arguments import root
from horovod.tensorflow.ops.arguments import variables as checked_variables
from horovod.tensorflow.tensors import check_type

_REFERENCE: Any = RefVariable
KIND = "HorovodBroadcast"
IN_PLACE = "HorovodBroadcastInplace"


class Broadcast(Collective, frozen=True):
    """Broadcasts tensors in one request. It has one output for each tensor.

    Attributes:
        parameters: the function that broadcasts parameters by this; "" if none does.
    """

    kind: str
    name: str | None
    root: int
    process_set: ProcessSet
    parameters: str = ""

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        if self.parameters and keeps_own(self.parameters):
            handle = Handle()
            handle.complete()
            return handle, lambda: list(inputs)
        process_set = self.process_set
        memory = memory_of(inputs)
        from_here = (process_set.ranks or [])[process_set.rank() or 0] == self.root
        rooms = [memory.changed(tensor, keeps=from_here) for tensor in inputs]
        described = [room.described() for room in rooms]
        members = process_set.process_set_id
        handle = collectives.broadcast(self.kind, self.name, described, self.root, members, awaited)
        return handle, lambda: memory.results(handle, rooms)


def broadcast_submission(
    kind: str, name: str | None, tensors: Sequence[Any], root: int, process_set: ProcessSet, parameters: str = ""
) -> Submission:
    """A submission that broadcasts tensors in one request. It has one output for each tensor. See :class:`Broadcast`."""
    collective = Broadcast(kind, name, root, process_set, parameters)
    return Submission(tensors, collective, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of global rank ``root_rank`` on every member of ``process_set``. Differentiable.

    Every member must call it with the same name, shape, dtype and root. Errors are those of
    :func:`horovod.tensorflow.ops.allreduce.allreduce`, and InvalidArgumentError for a root that is not a member.

    Args:
        tensor: a tensor or variable of any shape.
        root_rank: the global rank whose tensor is sent.
        name, ignore_name_scope: as for :func:`horovod.tensorflow.ops.allreduce.allreduce`.
        process_set: the ranks that take part. This rank must be a member.

    Returns:
        A new tensor of the same shape and dtype. The gradient of ``tensor`` is the average of the members' gradients on the
        root, and zeros on other ranks.
    """
    root_rank = root(root_rank, process_set)
    tensor = tf.convert_to_tensor(tensor)
    check_type(tensor, KIND)
    names = collective_name(KIND, name, [tensor], ignore_name_scope)

    @with_gradient
    def spread(tensor: Any) -> Any:
        output = run(names.node, [broadcast_submission(KIND, names.negotiated, [tensor], root_rank, process_set)])[0][0]

        def gradient(grad: Any) -> Any:
            """The average of the ranks' gradients on the root, and zeros on other ranks."""
            averaged = allreduce(grad, process_set=process_set)
            on_root = (process_set.ranks or [])[process_set.rank() or 0] == root_rank
            # All ranks make the same operations, because the names of collectives come from those of operations.
            return averaged * tf.cast(on_root, averaged.dtype)

        return output, gradient

    return spread(tensor)


@unconverted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables on every member of ``process_set`` with those of global rank ``root_rank``.

    Every member must call it with variables of the same shapes and dtypes in the same order. Not differentiable.

    Args:
        variables: variables of TensorFlow or Keras, all on one device. They are sent in one request.
        root_rank: the global rank whose values are used.
        name: identifies the call. The default is made of the variables' names in a graph, and a number in eager execution.
        process_set: the ranks that take part. This rank must be a member.

    Returns:
        The new values of the variables.

    Raises:
        ValueError: variables of TensorFlow 1 and 2 are mixed, or they are on several devices.
        as :func:`broadcast`.
    """
    return overwrite(variables, root_rank, name, process_set)


def overwrite(
    variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet, parameters: str = ""
) -> list[Any]:
    """:func:`broadcast_`, for a function that broadcasts ``parameters``; see :class:`Broadcast`."""
    root_rank = root(root_rank, process_set)
    variables = checked_variables(variables, "broadcast_")
    if not variables:
        return []
    if len({isinstance(variable, _REFERENCE) for variable in variables}) > 1:
        raise ValueError("broadcast_ takes either resource variables or reference variables, not a mixture of both")
    devices = {str(of_tensorflow(variable).device) for variable in variables}
    if len(devices) > 1:
        raise ValueError(f"Variables must be on the same device, not on {', '.join(sorted(devices))}")
    values = [tf.convert_to_tensor(of_tensorflow(variable)) for variable in variables]
    for value in values:
        check_type(value, IN_PLACE)
    names = collective_name(IN_PLACE, name, values)
    submission = broadcast_submission(IN_PLACE, names.negotiated, values, root_rank, process_set, parameters)
    received = run(names.node, [submission])[0]
    return [
        assigned if tf.is_tensor(assigned := variable.assign(value)) else value
        for variable, value in zip(variables, received, strict=True)
    ]


def of_tensorflow(variable: Any) -> Any:
    """The variable of TensorFlow. A variable of Keras 3 contains one."""
    return variable.value if hasattr(variable, "path") else variable
