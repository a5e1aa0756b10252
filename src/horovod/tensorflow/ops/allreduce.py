"""allreduce and its grouped form, of dense tensors and of ``tf.IndexedSlices``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import Adasum, Average, ReductionArguments, Sum, check_adasum
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import shown
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.ops.allgather import allgather
from horovod.tensorflow.ops.arguments import checked_reduction, compressor
from horovod.tensorflow.ops.dense_allreduce import GROUPED, KIND, reduce_dense
from horovod.tensorflow.reduced_marks import mark_tensor
from horovod.tensorflow.tensors import check_type


def _reduce_slices(
    slices: tf.IndexedSlices, reduction: ReductionArguments, name: str | None, ignore_name_scope: bool
) -> tf.IndexedSlices:
    """Gather the values and indices of all ranks. An Average divides the values by the number of ranks."""
    if reduction.op == Adasum:
        raise NotImplementedError(
            "op=hvd.Adasum does not support tf.IndexedSlices; pass sparse_as_dense=True to DistributedOptimizer"
        )
    if reduction.op not in (Sum, Average):
        raise NotImplementedError(
            f"tf.IndexedSlices can be reduced with hvd.Sum or hvd.Average, not hvd.{reduction.op.label}"
        )
    if reduction.prescale != 1.0 or reduction.postscale != 1.0:
        raise NotImplementedError("prescale_factor and postscale_factor are not supported for tf.IndexedSlices")
    names = (f"{name}_values", f"{name}_indices") if name else (None, None)
    values = allgather(slices.values, names[0], ignore_name_scope, reduction.process_set)
    indices = allgather(slices.indices, names[1], ignore_name_scope, reduction.process_set)
    if reduction.op == Average:
        values = values / tf.cast(reduction.process_set.size() or 1, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """``postscale_factor * reduce(op, prescale_factor * tensor)`` over the ranks of ``process_set``. Differentiable.

    Every member must call it with the same name, shape, dtype, op and factors, eagerly or in a graph.

    Args:
        tensor: a tensor of any shape, a variable, or ``tf.IndexedSlices``, whose values and indices are gathered from all
            ranks. ``tf.IndexedSlices`` allow only Average and Sum, and no factors.
        average: deprecated; use ``op``. True means ``hvd.Average``, False ``hvd.Sum``.
        device_dense, device_sparse: the device that a dense or sparse result is put on. It does not determine where the
            reduction runs.
        compression: compresses the tensor before it is sent. Not used for ``tf.IndexedSlices``.
        op: ``hvd.Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards.
        name: identifies the call. The default is the tensor's name in a graph, and a number in eager execution.
        process_set: the ranks that reduce. This rank must be a member.
        ignore_name_scope: leave a graph's name scopes out of the name.

    Returns:
        A new tensor of the same shape and dtype, or ``tf.IndexedSlices``.

    Raises:
        NotImplementedError: ``op`` or the factors are not supported for ``tf.IndexedSlices``, or Adasum is to reduce over some
            of the ranks.
        tf.errors.InvalidArgumentError, which is a ValueError too: a bad argument, a name that is still in use, or this
            rank is not a member.
        TypeError: the elements are of a type that cannot be communicated.
        tf.errors.FailedPreconditionError, which is a HorovodInternalError too: the ranks disagree, or not initialised.
        tf.errors.UnknownError, which is a HorovodInternalError too: the job has failed or was shut down.
        In a graph, when it runs: InvalidArgumentError for a wrong value, UnknownError if ranks disagree or the job failed.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    compression = compressor(compression)
    with of_both_kinds():
        reduction = reduction.compressed_by(compression)
    check_adasum(reduction.op, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse or None):
            return _reduce_slices(tensor, reduction, name, ignore_name_scope)
    tensor = tf.convert_to_tensor(tensor)
    compressed, context = compression.compress(tensor)
    check_type(compressed, KIND)
    names = collective_name(KIND, name, [tensor], ignore_name_scope)
    reduced = reduce_dense(KIND, names, [compressed], reduction)[0]
    return mark_tensor(compression.decompress(placed(reduced, device_dense), context), process_set)


def placed(tensor: Any, device: str | None) -> Any:
    """The tensor on ``device``. If ``device`` is empty, the tensor is returned unchanged."""
    if not isinstance(device, str | None):
        raise TypeError(f"device_dense={shown(device)}: expected the name of a device, such as '/cpu:0'")
    if not device:
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """:func:`allreduce` of several tensors in one request. Differentiable.

    Every member must call it with the same number of tensors in the same order. The other arguments and the errors are those
    of :func:`allreduce`.

    Args:
        tensors: the tensors may differ in shape and dtype. Each ``tf.IndexedSlices`` is reduced in a separate request.

    Returns:
        A list of new tensors in the order of ``tensors``. An empty list is returned unchanged.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    compression = compressor(compression)
    with of_both_kinds():
        reduction = reduction.compressed_by(compression)
    if not isinstance(tensors, list | tuple):
        tensors = list(tensors)
    if not tensors:
        return tensors
    check_adasum(reduction.op, process_set)
    results: list[Any] = [None] * len(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            label = f"{name}_{index}" if name else None
            results[index] = allreduce(
                tensor,
                device_sparse=device_sparse,
                op=reduction.op,
                prescale_factor=reduction.prescale,
                postscale_factor=reduction.postscale,
                name=label,
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
    if dense:
        originals = [tf.convert_to_tensor(tensors[index]) for index in dense]
        compressed, contexts = zip(*[compression.compress(tensor) for tensor in originals], strict=True)
        for tensor in compressed:
            check_type(tensor, GROUPED)
        names = collective_name(GROUPED, name, originals, ignore_name_scope)
        reduced = reduce_dense(GROUPED, names, compressed, reduction)
        for index, tensor, context in zip(dense, reduced, contexts, strict=True):
            results[index] = mark_tensor(compression.decompress(placed(tensor, device_dense), context), process_set)
    return results
