"""Collectives of single values for Keras 2 and 3 on TensorFlow. They call those of ``horovod.tensorflow``.

They return tensors in eager execution. In a graph of TensorFlow 1 they run in Keras's session and return arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from horovod._keras import values
from horovod.tensorflow import functions, mpi_ops
from horovod.tensorflow.compression import Compression

_Function = TypeVar("_Function", bound=Callable[..., Any])


def documented_as(other: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate a function with the docstring of ``other``."""

    def document(function: _Function) -> _Function:
        function.__doc__ = other.__doc__
        return function

    return document


def _value(tensor: Any) -> Any:
    """The tensor. In a graph of TensorFlow 1, its value in Keras's session."""
    if tf.executing_eagerly() or tf.inside_function():
        return tensor
    with tf.compat.v1.keras.backend.get_session().graph.as_default():
        return tf.compat.v1.keras.backend.get_session().run(tensor)


@documented_as(values.allreduce)
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    return _value(
        mpi_ops.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            name=name,
            compression=compression or Compression.none,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
    )


@documented_as(values.allgather)
def allgather(value: Any, name: str | None = None) -> Any:
    return _value(mpi_ops.allgather(tf.convert_to_tensor(value), name=name))


@documented_as(values.broadcast)
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    return _value(mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


@documented_as(values.reducescatter)
def reducescatter(value: Any, name: str | None = None, op: Any = mpi_ops.Average) -> Any:
    return _value(mpi_ops.reducescatter(tf.convert_to_tensor(value), op=op, name=name))


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast all variables of a graph of TensorFlow 1, in Keras's session.

    Raises:
        RuntimeError: in eager execution, which has no list of all variables. Use the callback instead.
    """
    operation = functions.broadcast_global_variables(root_rank)
    tf.compat.v1.keras.backend.get_session().run(operation)
