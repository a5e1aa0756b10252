"""Collectives of single values and the broadcast of variables, for Keras 3 on PyTorch and JAX.

A value is anything that ``keras.ops.convert_to_tensor`` accepts. Results are tensors of the backend. These calls are meant for
use between training steps. On the TensorFlow backend, ``horovod.tensorflow`` is used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod._bindings.compression import form_of
from horovod._bindings.reductions import Average, ReductionArguments, reduction
from horovod._bindings.scalars import real, whole
from horovod._models import contents
from horovod._models.contents import described
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.common.basics import rank, size
from horovod.comparison import agreed
from horovod.core.requests.batch import shard_rows
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives


def array_of(value: Any) -> Array:
    """A C-contiguous copy of a value in host memory."""
    import keras

    return np.array(keras.ops.convert_to_numpy(value), order="C")


def tensor_of(array: Array) -> Any:
    """An array as a tensor of the backend."""
    import keras

    return keras.ops.convert_to_tensor(array)


def _finished(handle: Handle, array: Array) -> Any:
    handle.wait()
    return tensor_of(array)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """``postscale_factor * reduce(op, prescale_factor * value)`` over all ranks, as a tensor. The default op is Average.

    Every rank must call it, with the same name, op and factors. Waits for the result. Not differentiable.

    Args:
        value: anything that Keras converts to a tensor, of the same shape and type on all ranks.
        name: identifies the call. Calls without a name are numbered.
        average: deprecated; use ``op``. True means ``hvd.Average``, False ``hvd.Sum``.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards.
        op: ``hvd.Average``, ``hvd.Sum`` or another reduction. None: ``hvd.Average``.
        compression: one of ``hvd.Compression``. None: the value is not compressed.

    Raises:
        TypeError, ValueError: an argument is wrong, or the name is in use.
        HorovodInternalError: not initialised, the ranks disagree, or the job has failed.
    """
    import keras

    chosen = reduction(op, average)
    prescale_factor, postscale_factor = (
        real(prescale_factor, "prescale_factor"),
        real(postscale_factor, "postscale_factor"),
    )
    form = ReductionArguments(chosen, chosen_form=form_of(compression, chosen)).form
    tensor, context = keras.ops.convert_to_tensor(value), None
    if compression is not None:
        tensor, context = compression.compress(tensor)
    array = array_of(tensor)
    tensors = [described(array)]
    handle = collectives.allreduce(
        "allreduce",
        name,
        tensors,
        tensors,
        chosen,
        prescale_factor,
        postscale_factor,
        awaited=True,
        compression=form,
    )
    reduced = _finished(handle, array)
    return reduced if compression is None else compression.decompress(reduced, context)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate every rank's ``value`` along dimension 0, in rank order, as a tensor.

    Every rank must call it. Waits for the result. Not differentiable. Errors are those of :func:`allreduce`.

    Args:
        value: anything that Keras converts to a tensor of at least one dimension. The first dimension may differ between
            ranks; the other dimensions and the type must agree.
        name: identifies the call. Calls without a name are numbered.
    """
    import keras

    array = array_of(keras.ops.convert_to_tensor(value))
    gathered: list[Array] = []

    def allocate(_: int, rows: int) -> Array:
        gathered.append(np.empty((rows, *array.shape[1:]), array.dtype))
        return gathered[0].reshape(-1)

    collectives.allgather("allgather", name, [described(array)], allocate, awaited=True).wait()
    return tensor_of(gathered[0])


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank ``root_rank``'s ``value`` on every rank, as a tensor.

    Every rank must call it. Waits for the result. Not differentiable. Errors are those of :func:`allreduce`, and ValueError if
    ``root_rank`` is not a rank of the job.

    Args:
        value: anything that Keras converts to a tensor, of the same shape and type on all ranks.
        root_rank: the rank whose value is sent.
        name: identifies the call. Calls without a name are numbered.
    """
    import keras

    root_rank = whole(root_rank, "root_rank")
    array = array_of(keras.ops.convert_to_tensor(value))
    return _finished(collectives.broadcast("broadcast", name, [described(array)], root_rank, awaited=True), array)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """This rank's rows of the reduction of ``value`` over all ranks, as a tensor.

    If the rows cannot be divided evenly, the first ranks get one more. Every rank must call it. Waits for the result. Not
    differentiable. Errors are those of :func:`allreduce`.

    Args:
        value: anything that Keras converts to a tensor of at least one dimension, of the same shape and type on all ranks.
        name: identifies the call. Calls without a name are numbered.
        op: ``hvd.Average`` or ``hvd.Sum``.
    """
    import keras

    array = array_of(keras.ops.convert_to_tensor(value))
    if not array.shape:
        raise ValueError("Reducescatter does not support scalar inputs")
    mine = np.empty((shard_rows(array.shape[0], size())[rank()], *array.shape[1:]), array.dtype)
    handle = collectives.reducescatter(
        "reducescatter", name, [described(array)], [described(mine)], reduction(op), awaited=True
    )
    return _finished(handle, mine)


def all_say(yes: bool) -> bool:
    """Whether ``yes`` is true on all ranks. Every rank must call it."""
    answer = np.array([yes], np.uint8)
    tensors = [described(answer)]
    collectives.allreduce("allreduce", None, tensors, tensors, ReduceOp.MIN, awaited=True).wait()
    return bool(answer[0])


def highest(value: float) -> float:
    """The largest of all ranks' values. Every rank must call it."""
    values = np.array([value], np.float64)
    tensors = [described(values)]
    collectives.allreduce("allreduce", None, tensors, tensors, ReduceOp.MAX, awaited=True).wait()
    return float(values[0])


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Assign the values of rank ``root_rank`` to the variables of every rank, for every backend and version of Keras.

    Every rank must pass the same variables in the same order.
    """
    root_rank = whole(root_rank, "root_rank")
    if not variables:
        return
    arrays = contents.read(variables)
    collectives.broadcast("broadcast", None, [described(array) for array in arrays], root_rank, awaited=True).wait()
    contents.write(variables, arrays)
    agreed.number(variables)
