"""Reduces the gradients of a model. All tapes and optimizers of TensorFlow and Keras use :func:`reduce_gradients`.

Gradients are sent in buckets. In a graph, each bucket is submitted as soon as its own gradients are ready, while backward
continues, and one operation collects the results of all buckets. In eager execution, all buckets are submitted before the
first result is waited for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common.buckets import bucket_limit, check_groups, cut, cut_by_groups
from horovod.common.reduction_settings import ReductionSettings
from horovod.common.reductions import Reducing, check_members, check_predivide
from horovod.common.scalars import real, whole_if_number
from horovod.core.requests.handle import Handle
from horovod.core.submission.arguments import set_id
from horovod.core.submission.collectives import prepared_allreduce, submit
from horovod.core.submission.prepared import device_of
from horovod.observe.call_site import caller
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.device import memory_of
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.allreduce import allreduce, placed
from horovod.tensorflow.ops.arguments import compressor
from horovod.tensorflow.ops.tensors import check_type

KIND = "HorovodAllreduce"


@dataclass(frozen=True, kw_only=True)
class Reduction(ReductionSettings):
    """How TensorFlow's gradients are reduced. The arguments are checked here.

    Attributes:
        device_dense, device_sparse: the devices that dense and sparse results are put on.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is wrong; the text says which.
    """

    compression: type[Compressor] = Compression.none
    device_dense: str = ""
    device_sparse: str = ""

    def __post_init__(self) -> None:
        set_id(self.process_set)
        object.__setattr__(self, "predivide", real(self.predivide, "gradient_predivide_factor"))
        object.__setattr__(self, "compression", compressor(self.compression))
        check_predivide(self.predivide, self.op)
        object.__setattr__(self, "groups", check_groups(whole_if_number(self.groups), "tf.Variable", identity))
        check_members(self.op, self.process_set)


@unconverted
def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any] | None = None,
    reduction: Reduction | None = None,
    name: str = "DistributedGradients",
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Reduce gradients over the ranks. Every member of the process set must call it with the same number of gradients.

    It works eagerly and in a graph that is being built. It is not differentiable.

    Args:
        gradients: tensors, ``tf.IndexedSlices``, or None. None stays None and must be None on all ranks.
        variables: the variables of these gradients in the same order, of TensorFlow or Keras. They are used in messages and
            for ``groups``.
        reduction: how gradients are reduced. The default is an average over all ranks.
        name: the name of the operation in a graph. The ranks match gradients by this name, their order, types and shapes.
        ignore_name_scope: leave a graph's name scopes out of the name, because they may differ from rank to rank.

    Returns:
        The reduced gradients, in the order of ``gradients``.

    Raises:
        as :func:`horovod.tensorflow.ops.allreduce.allreduce`.
    """
    reduction = reduction or Reduction()
    results = list(gradients)
    process_set = reduction.process_set
    if not reduction.active():
        return results
    labels = [_label(variables[i] if variables is not None else None, i) for i in range(len(results))]
    dense: list[int] = []
    for index, gradient in enumerate(results):
        if gradient is None:
            continue
        if isinstance(gradient, tf.IndexedSlices) and not reduction.sparse_as_dense:
            results[index] = allreduce(
                gradient,
                device_sparse=reduction.device_sparse,
                op=reduction.op,
                name=f"{name}_{index}",
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
            continue
        results[index] = tf.convert_to_tensor(gradient)
        dense.append(index)
    if not dense:
        return results
    sent, contexts = [], []
    for index in dense:
        compressed, context = reduction.compression.compress(results[index])
        check_type(compressed, labels[index])
        sent.append(compressed)
        contexts.append(context)
    own_labels = [labels[index] for index in dense]
    own_variables = [variables[index] for index in dense] if variables is not None else None
    buckets = _buckets(sent, own_variables, reduction.groups)
    signature = _signature(sent)
    node, negotiated = collective_name(KIND, f"{name}_Allreduce", sent, ignore_name_scope)
    line = caller()
    submissions = [
        _submission(
            f"{negotiated}.{signature}.{number}",
            [own_labels[i] for i in bucket],
            [sent[i] for i in bucket],
            reduction,
            line,
        )
        for number, bucket in enumerate(buckets)
    ]
    for bucket, outputs in zip(buckets, run(node, submissions), strict=True):
        for i, output in zip(bucket, outputs, strict=True):
            restored = reduction.compression.decompress(placed(output, reduction.device_dense), contexts[i])
            results[dense[i]] = restored
    return results


def _label(variable: Any, index: int) -> str:
    """The name of a gradient in messages."""
    if variable is None:
        return f"gradient.{index}"
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or f"gradient.{index}")


def identity(variable: Any) -> Any:
    """A key that is equal for two references to the same variable or tensor, of TensorFlow or of Keras 3."""
    variable = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _bytes(tensor: Any) -> int:
    elements = tensor.shape.num_elements()
    return 0 if elements is None else int(elements) * int(tensor.dtype.size)


def _buckets(
    tensors: Sequence[Any], variables: Sequence[Any] | None, groups: int | list[list[Any]] | None
) -> list[list[int]]:
    """The indices of the tensors in each bucket."""
    if isinstance(groups, int):
        return cut_by_groups(range(len(tensors)), groups)
    if groups is not None and variables is not None:
        lists = [[identity(variable) for variable in group] for group in groups]
        return cut_by_groups([identity(variable) for variable in variables], lists)
    limit = bucket_limit(on_processor=True)
    return cut([(tensor.dtype, _bytes(tensor)) for tensor in tensors], limit)


def _signature(tensors: Sequence[Any]) -> str:
    """A text that is different for gradients of different shapes or types, so that the core keeps separate buffers for them.

    It does not contain the names of variables: TensorFlow and Keras number variables in the order in which a rank makes
    them, and this order may differ from rank to rank.
    """
    text = repr([(str(tensor.shape), tensor.dtype.name) for tensor in tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class ReduceGradients(Collective, frozen=True):
    """Reduces the gradients of one bucket in one request."""

    name: str
    labels: Sequence[str]
    how: Reducing
    line: str

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        how = self.how
        memory = memory_of(inputs, how)
        views = memory.read(inputs)
        rooms = [memory.room(tensor, each.shape) for each, tensor in zip(views, inputs, strict=True)]
        described = [(label, each.data_type, each.shape) for label, each in zip(self.labels, views, strict=True)]
        prepared = prepared_allreduce(
            self.name, described, how.op, how.prescale, how.postscale, self.line, device_of(views)
        )
        targets = [room.described() for room in rooms]
        handle = submit(how.process_set.process_set_id, prepared.request, views, targets, awaited=awaited)
        return handle, lambda: memory.results(handle, rooms)


def _submission(
    name: str, labels: Sequence[str], tensors: Sequence[Any], reduction: Reduction, line: str
) -> Submission:
    """The submission of one bucket."""
    prescale, postscale = reduction.scales()
    how = Reducing(reduction.op, prescale, postscale, reduction.process_set)
    collective = ReduceGradients(name, labels, how, line)
    return Submission(tensors, collective, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
