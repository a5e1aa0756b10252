"""Broadcasts of variables and of picklable objects, and all-gathers of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from horovod._bindings import objects
from horovod._bindings.scalars import whole
from horovod.comparison import agreed
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import set_id
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.arguments import root
from horovod.tensorflow.ops.arguments import variables as checked_variables
from horovod.tensorflow.ops.broadcast import broadcast_submission, of_tensorflow, overwrite
from horovod.tensorflow.tensors import check_type

KIND = "HorovodBroadcast"
_VARIABLES = "hvd.broadcast_variables()"


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables on every rank with those of rank ``root_rank``. Every member of ``process_set`` must call it.

    Call it after the variables exist. An optimizer's variables exist after the first step or ``optimizer.build``. In a process
    that joins a running elastic job it does nothing before ``hvd.elastic.run``.

    Args:
        variables: variables of TensorFlow or Keras, in the same order on every rank.
        root_rank: the global rank whose values are used.
        process_set: the ranks that take part. This rank must be a member.
        inplace: use ``hvd.broadcast_``, with one call for the variables of each device.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        as ``hvd.broadcast``.
    """
    root_rank = root(root_rank, process_set)
    variables = checked_variables(variables, "broadcast_variables")
    if not variables:
        return None if tf.executing_eagerly() else tf.no_op()
    if inplace:
        by_device: dict[str, list[Any]] = {}
        for variable in variables:
            by_device.setdefault(str(of_tensorflow(variable).device), []).append(variable)
        done = [
            value
            for number, members in enumerate(by_device.values())
            for value in overwrite(members, root_rank, f"broadcast_variables_{number}", process_set, _VARIABLES)
        ]
        return None if tf.executing_eagerly() else tf.group(*done)
    values = [tf.convert_to_tensor(of_tensorflow(variable)) for variable in variables]
    for value in values:
        check_type(value, KIND)
    names = collective_name(KIND, "broadcast_variables", values)
    submission = broadcast_submission(KIND, names.negotiated, values, root_rank, process_set, _VARIABLES)
    received = run(names.node, [submission])[0]
    assigned = [variable.assign(value) for variable, value in zip(variables, received, strict=True)]
    if tf.executing_eagerly():
        if process_set is global_process_set:
            agreed.number(variables)
        return None
    return tf.group(*[each for each in assigned if each is not None])


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that overwrites all global variables of a TensorFlow 1 graph with those of rank ``root_rank``.

    Every rank must call it and run the operation.

    Args:
        root_rank: the rank whose values are used.

    Raises:
        RuntimeError: in eager execution, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped base
    """Broadcasts all global variables from rank ``root_rank`` when a session of TensorFlow 1 is created.

    All ranks then start with the same values, random ones or those of a checkpoint that only the root has. Every rank must
    use it.

    Args:
        root_rank: the rank whose values are used.
        device: accepted for compatibility.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph. TensorFlow calls this before the graph is finalized."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`horovod._bindings.objects.broadcast_object`. Every member of ``process_set`` must call it.

    It runs immediately, both in eager execution and while a graph is being built.

    Args:
        obj, root_rank, name, process_set: as there.
        session: accepted for compatibility. No session is needed.
    """
    with of_both_kinds():
        set_id(process_set)
        return objects.broadcast_object(obj, whole(root_rank, "root_rank"), name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that calls :func:`broadcast_object` with its argument.

    Args:
        root_rank, session, name, process_set: as for :func:`broadcast_object`.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As :func:`horovod._bindings.objects.allgather_object`. Every member of ``process_set`` must call it.

    It runs immediately, both in eager execution and while a graph is being built.

    Args:
        obj, name, process_set: as there.
        session: accepted for compatibility. No session is needed.
    """
    with of_both_kinds():
        set_id(process_set)
        return objects.allgather_object(obj, name, process_set)
