"""Ranks and sizes as operations. A graph evaluates them in every run, so they are right in every round of an elastic job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod._bindings.scalars import whole
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.lifecycle.process_set import membership
from horovod.core.submission.arguments import full_name
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.callbacks import Callback
from horovod.tensorflow.graph.decorators import unconverted

_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3


def _set_size(process_set_id: int) -> int:
    if process_set_id == 0:
        return basics.size()
    context.current()
    try:
        return len(membership.ranks[process_set_id])
    except KeyError:
        raise ValueError(f"Process set {process_set_id} does not exist, or has not been registered.") from None


def _included(process_set_id: int) -> int:
    if not basics.is_initialized():
        return _NOT_INITIALIZED
    members = membership.ranks.get(process_set_id)
    return _UNKNOWN_SET if members is None else int(membership.rank in members)


_ANSWERS: dict[str, Callable[[int], int]] = {
    "HorovodSize": _set_size,
    "HorovodLocalSize": lambda _: basics.local_size(),
    "HorovodRank": lambda _: basics.rank(),
    "HorovodLocalRank": lambda _: basics.local_rank(),
    "HorovodProcessSetIncluded": _included,
    "HorovodGeneration": lambda _: context.running().generation if basics.is_initialized() else _NOT_INITIALIZED,
}


def _answer(kind: Any, process_set_id: Any) -> Any:
    return tf.constant(_ANSWERS[kind.numpy().decode()](int(process_set_id)), tf.int32)


_ASK = Callback("HorovodTopology", _answer)


def _scalar(kind: str, name: str | None, process_set_id: int = 0) -> Any:
    """The value of this kind as an int32 scalar. In a graph, an operation that reads the value in every run."""
    name = full_name(kind, name).removeprefix(f"{kind}.") or None  # raises if it is not a name
    if tf.executing_eagerly():
        with of_both_kinds():
            return tf.constant(_ANSWERS[kind](process_set_id), tf.int32)
    with tf.device("CPU:0"):
        result = _ASK.add([tf.constant(kind), tf.constant(process_set_id)], [tf.int32], name or kind)[0]
    result.set_shape(())
    return result


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a process set, as an int32 scalar.

    Args:
        process_set_id: the number of the process set; 0 is the global one.
        name: the name of the operation in a graph.
    """
    process_set_id = whole(process_set_id, "process_set_id")
    return _scalar("HorovodSize", name, process_set_id)


@unconverted
def local_size_op(name: str | None = None) -> Any:
    """The number of processes of the job on this host, as an int32 scalar.

    Args:
        name: the name of the operation in a graph.
    """
    return _scalar("HorovodLocalSize", name)


@unconverted
def rank_op(name: str | None = None) -> Any:
    """This process's number in the job, from 0, as an int32 scalar.

    Args:
        name: the name of the operation in a graph.
    """
    return _scalar("HorovodRank", name)


@unconverted
def local_rank_op(name: str | None = None) -> Any:
    """This process's number on its host, from 0, as an int32 scalar.

    Args:
        name: the name of the operation in a graph.
    """
    return _scalar("HorovodLocalRank", name)


@unconverted
def generation_op() -> Any:
    """The number of the running generation, as an int32 scalar, -1 without ``hvd.init()``. What variables of this process that
    no state shares say of a step is void in another generation, in which other ranks have other values or none."""
    return _scalar("HorovodGeneration", None)


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process is a member of the process set, 0 if not, -1 without ``hvd.init()``, -3 for an unknown set (int32).

    Args:
        process_set_id: the number of the process set; 0 is the global one.
        name: the name of the operation in a graph.
    """
    process_set_id = whole(process_set_id, "process_set_id")
    return _scalar("HorovodProcessSetIncluded", name, process_set_id)
