"""Reduces the gradients of a model. All tapes and optimizers of TensorFlow and Keras use :func:`reduce_gradients`.

Gradients are sent in buckets. In a graph, each bucket is submitted as soon as its own gradients are ready, while backward
continues, and one operation collects the results of all buckets. In eager execution, all buckets are submitted before the
first result is waited for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod._bindings.bucket_division import bucket_limit, check_groups, cut, cut_by_groups
from horovod._bindings.reduction_settings import ReductionSettings
from horovod._bindings.reductions import Average, ReductionArguments, Sum, check_members, check_predivide
from horovod._bindings.scalars import real, whole_if_number
from horovod.comparison import agreed, missing_gradients
from horovod.core.errors import MismatchError
from horovod.core.negotiation.agreement import MISMATCHED
from horovod.core.submission.arguments import set_id
from horovod.observe.call_site import caller
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.decorators import unconverted, with_gradient
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.allreduce import allreduce, placed
from horovod.tensorflow.ops.arguments import compressor
from horovod.tensorflow.ops.dense_allreduce import reduce_dense
from horovod.tensorflow.tensors import check_type
from horovod.tensorflow.training import in_graph
from horovod.tensorflow.training.gradient_bucket import bucket_submission, of_numbers
from horovod.tensorflow.training.step_watch import StepWatch, shown

KIND = "HorovodAllreduce"
_OTHER_VARIABLES = (
    "The ranks ask for the gradients of different variables, or in another order. Ask for the gradients of the same variables "
    "in the same order on every rank; a gradient that is None on some ranks counts as zeros there."
)


@dataclass(frozen=True, kw_only=True)
class TensorFlowReduction(ReductionSettings):
    """How TensorFlow's gradients are reduced. Checks its arguments.

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
        super().__post_init__()
        check_predivide(self.predivide, self.op)
        object.__setattr__(self, "groups", check_groups(whole_if_number(self.groups), "tf.Variable", identity))
        check_members(self.op, self.process_set)


@unconverted
def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any] | None = None,
    reduction: TensorFlowReduction | None = None,
    name: str = "DistributedGradients",
    ignore_name_scope: bool = False,
    watch: StepWatch | None = None,
) -> list[Any]:
    """Reduce gradients over the ranks. Every member of the process set must call it with the same number of gradients.

    It works eagerly and in a graph that is being built. It is differentiable, if the gradients are dense.

    Args:
        gradients: tensors, ``tf.IndexedSlices``, or None. A gradient that is None on some ranks counts as zeros there; in a
            graph, whose operations are made before the ranks communicate, this is an error at run time. A gradient that is None
            on all ranks stays None.
        variables: the variables of these gradients in the same order, of TensorFlow or Keras. They are used in messages and
            for ``groups``.
        reduction: how gradients are reduced. The default is an average over all ranks.
        name: the name of the operation in a graph. The ranks match gradients by this name, their order, types and shapes.
        ignore_name_scope: leave a graph's name scopes out of the name, because they may differ from rank to rank.
        watch: the functions that look at each step. None: nothing looks at it.

    Returns:
        The reduced gradients, in the order of ``gradients``.

    Raises:
        as :func:`horovod.tensorflow.ops.allreduce.allreduce`.
    """
    reduction = reduction or TensorFlowReduction()
    found = list(gradients)
    if not found or not reduction.active():
        return found
    sources = list(gradients if variables is None else variables)
    labels = [_label(source, index) for index, source in enumerate(sources)]
    kept = (tf.IndexedSlices,) if not reduction.sparse_as_dense else ()
    found = [each if each is None or isinstance(each, kept) else tf.convert_to_tensor(each) for each in found]
    call = _Call(sources, labels, reduction, name, ignore_name_scope, None if watch is None else watch.begin)
    try:
        if watch is not None and tf.executing_eagerly():
            with of_both_kinds():
                watch.begin()
        if watch is not None and watch.see is not None:
            unique = [label if labels.count(label) == 1 else f"{label} ({at})" for at, label in enumerate(labels)]
            found = [shown(each, label, watch.see) for each, label in zip(found, unique, strict=True)]
        return call.reduce(found)
    except MismatchError as error:
        called = f"{name}.{_signature(sources)}.missing_gradients"
        together = missing_gradients.exchange(_kinds(found), reduction.process_set, called)
        if together is None:
            if str(error).startswith(MISMATCHED):
                raise error.extended(f"{_OTHER_VARIABLES} This rank has {_shown(labels)}.") from None
            raise
    return call.reduce(
        [_filled(each, kind, source) for each, kind, source in zip(found, together, sources, strict=True)]
    )


class _Call:
    """The arguments of one call of :func:`reduce_gradients`, except for the gradients."""

    def __init__(
        self,
        sources: Sequence[Any],
        labels: Sequence[str],
        reduction: TensorFlowReduction,
        name: str,
        ignore_name_scope: bool,
        at_start: Callable[[], None] | None,
    ) -> None:
        self._sources, self._labels, self._reduction = sources, labels, reduction
        self._name, self._ignore_name_scope = name, ignore_name_scope
        self._at_start = at_start

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduce ``gradients``. Every rank must have the gradients of the same variables.

        Raises:
            MismatchError: the ranks have gradients of different variables.
        """
        results = list(gradients)
        dense = [index for index, each in enumerate(results) if each is not None and not _is_sparse(each)]
        reduced, done = self._reduce_dense({index: results[index] for index in dense}, _kinds(results))
        for index, gradient in reduced.items():
            results[index] = gradient
        # After the dense ones, whose requests show whether ranks have different gradients: then no rank waits here in vain.
        for index, gradient in enumerate(results):
            if _is_sparse(gradient):
                with tf.control_dependencies([] if tf.executing_eagerly() else [done]):
                    results[index] = self._reduce_sparse(gradient, index)
        return results

    def _reduce_sparse(self, gradient: Any, index: int) -> Any:
        reduced = allreduce(
            gradient,
            device_sparse=self._reduction.device_sparse,
            op=self._reduction.op,
            name=f"{self._name}_{index}",
            process_set=self._reduction.process_set,
            ignore_name_scope=self._ignore_name_scope,
        )
        values = _not_differentiable(reduced.values, self._labels[index])
        return tf.IndexedSlices(values, reduced.indices, reduced.dense_shape)

    def _reduce_dense(self, gradients: Mapping[int, Any], kinds: Sequence[int]) -> tuple[dict[int, Any], Any]:
        """Reduce the dense gradients, by index. Even if there are none, the ranks compare ``kinds``, those of all gradients.

        Returns:
            The results by index, and a tensor that is ready when the ranks have found that they have the same gradients.
        """
        reduction = self._reduction
        compressed = {index: reduction.compression.compress(gradient) for index, gradient in gradients.items()}
        for index, (tensor, _) in compressed.items():
            check_type(tensor, self._labels[index])
        buckets = [
            [index for index in bucket if index in compressed] for bucket in _buckets(self._sources, reduction.groups)
        ]
        order = [index for bucket in buckets for index in bucket]
        signature, line, arguments = _signature(self._sources), caller(), _arguments(reduction)
        absent = [label for label, kind in zip(self._labels, kinds, strict=True) if not kind]
        lacking = f"This rank's graph has no gradient of {_shown(absent)}, and has variables {_shown(self._labels)}."
        own = [compressed[index][0] for index in sorted(compressed)]
        node, negotiated = collective_name(KIND, f"{self._name}_Allreduce", own, self._ignore_name_scope)

        # All ranks number variables anew in each generation, and a graph may run in several.
        numbers = agreed.VariableNumbers(self._sources) if all(map(_is_of_no_graph, self._sources)) else None
        numbers_in_graph = in_graph.number(numbers)
        alike = missing_gradients.describe(kinds)
        if tf.executing_eagerly() and numbers is not None:
            alike += of_numbers(numbers())

        def submissions(tensors: Mapping[int, Any]) -> list[Submission]:
            return [
                bucket_submission(
                    f"{negotiated}.{signature}.{number}",
                    # A bucket without gradients sends a zero, so that other ranks see which gradients this rank has.
                    [self._labels[index] for index in bucket] or ["no gradient"],
                    [tensors[index] for index in bucket] or [tf.zeros([1])],
                    arguments,
                    line,
                    alike,
                    lacking,
                    numbers_in_graph,
                    None if number else self._at_start,
                )
                for number, bucket in enumerate(buckets)
            ]

        @with_gradient
        def run_all(*tensors: Any) -> Any:
            found = run(node, submissions(dict(zip(order, tensors, strict=True))))
            outputs = [each for bucket, made in zip(buckets, found, strict=True) for each in made[: len(bucket)]]
            return outputs, lambda *upstream: self._of_upstream(order, upstream)

        if not order:
            return {}, run(node, submissions({}))[0][0]
        outputs = run_all(*[compressed[index][0] for index in order])
        results = {
            index: reduction.compression.decompress(placed(output, reduction.device_dense), compressed[index][1])
            for index, output in zip(order, outputs, strict=True)
        }
        return results, outputs[0]

    def _of_upstream(self, order: Sequence[int], upstream: Sequence[Any]) -> list[Any]:
        """The gradients of the reduction. If it is a sum or an average, they are reduced in the same way."""
        if self._reduction.op not in (Average, Sum):
            raise NotImplementedError(
                f"gradients that were reduced with hvd.{self._reduction.op.label} cannot be differentiated; use hvd.Average or "
                "hvd.Sum, or differentiate the gradients of a tf.GradientTape"
            )
        return reduce_dense(
            KIND, collective_name(KIND, None, list(upstream)), list(upstream), _arguments(self._reduction)
        )


def _arguments(reduction: TensorFlowReduction) -> ReductionArguments:
    return ReductionArguments(reduction.op, *reduction.scales(), reduction.process_set, reduction.chosen_form)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _kinds(gradients: Sequence[Any]) -> list[missing_gradients.GradientKind]:
    """The kind of each gradient."""
    kind = missing_gradients.GradientKind

    def of(gradient: Any) -> missing_gradients.GradientKind:
        if gradient is None:
            return kind.ABSENT
        if not _is_sparse(gradient):
            return kind.DENSE
        return kind.SPARSE_LONG if gradient.indices.dtype == tf.int64 else kind.SPARSE

    return [of(each) for each in gradients]


def _filled(gradient: Any, kind: missing_gradients.GradientKind, source: Any) -> Any:
    """Convert a gradient to ``kind``. A missing one becomes zeros of the variable's shape or, if sparse, has no rows."""
    if kind == missing_gradients.GradientKind.ABSENT:
        return None
    shape, data_type = source.shape, tf.as_dtype(source.dtype)
    if kind == missing_gradients.GradientKind.DENSE:
        return tf.zeros(shape, data_type) if gradient is None else tf.convert_to_tensor(gradient)
    index_type = tf.int64 if kind == missing_gradients.GradientKind.SPARSE_LONG else tf.int32
    if gradient is None:
        nothing = tf.zeros([0, *shape[1:]], data_type)
        return tf.IndexedSlices(nothing, tf.zeros([0], index_type), tf.constant(list(shape), index_type))
    return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, index_type), gradient.dense_shape)


def _not_differentiable(tensor: Any, label: str) -> Any:
    """The same tensor. Differentiating a result of it raises an error."""

    @with_gradient
    def passed(tensor: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            raise NotImplementedError(
                f"the reduced gradient of {label} is a tf.IndexedSlices, which cannot be differentiated; pass "
                "sparse_as_dense=True"
            )

        return tf.identity(tensor), gradient

    return passed(tensor)


def _shown(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return (", ".join(labels[:8]) + more) or "none"


def _label(variable: Any, index: int) -> str:
    """The name of a gradient in messages."""
    if variable is None:
        return f"gradient.{index}"
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or f"gradient.{index}")


def identity(variable: Any) -> Any:
    """A key that is equal for two references to the same variable or tensor, of TensorFlow or of Keras 3."""
    variable = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _bytes(source: Any) -> int:
    elements = tf.TensorShape(source.shape).num_elements()
    return 0 if elements is None else int(elements) * int(tf.as_dtype(source.dtype).size)


def _buckets(sources: Sequence[Any], groups: int | list[list[Any]] | None) -> list[list[int]]:
    """The positions of the gradients in each bucket: the same on all ranks, even if they have different gradients."""
    if isinstance(groups, int):
        return cut_by_groups(range(len(sources)), groups)
    if groups is not None:
        lists = [[identity(variable) for variable in group] for group in groups]
        return cut_by_groups([identity(source) for source in sources], lists)
    sizes = [("", 0) if source is None else (tf.as_dtype(source.dtype), _bytes(source)) for source in sources]
    return cut(sizes, bucket_limit(on_processor=True))


def _signature(sources: Sequence[Any]) -> str:
    """A text that is different for variables of different shapes or types, so that the core keeps separate buffers for them.

    It does not contain the names of variables: TensorFlow and Keras number variables in the order in which a rank makes
    them, and this order may differ from rank to rank.
    """
    text = repr([None if each is None else (str(tuple(each.shape)), str(each.dtype)) for each in sources])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _is_of_no_graph(source: Any) -> bool:
    """Whether a source is a variable of TensorFlow 2, which refers to no graph."""
    variable = getattr(source, "_value", source) if hasattr(source, "path") else source
    return isinstance(variable, tf.Variable) and hasattr(getattr(variable, "handle", None), "numpy")
