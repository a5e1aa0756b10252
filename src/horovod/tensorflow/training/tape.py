"""``DistributedGradientTape``: a gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._bindings.bucket_division import chosen_groups
from horovod._bindings.local_variables import checked_layers
from horovod._bindings.reductions import Average, reduction
from horovod._bindings.scalars import whole
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import shown
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.reduced_marks import mark
from horovod.tensorflow.training.gradients import TensorFlowReduction
from horovod.tensorflow.training.local_sources import LocalSources


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]  # untyped base
    """The methods that override those of the wrapped tape. Every distributed tape is of a class derived from both."""

    _horovod: TensorFlowReduction
    _local_sources: LocalSources

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """The gradients of ``target``, reduced over the ranks. The gradients of local sources are not reduced.

        Every member of the process set must call it for the same sources in the same order. A distributed optimizer of
        Keras that reduces over the same process set applies these gradients without a second reduction.

        Args:
            target: the tensor, or structure of tensors, to differentiate.
            sources: variables or tensors, in any structure. The result has the same structure.
            output_gradients: as for ``tf.GradientTape.gradient``.
            use_generic_names: accepted for compatibility. Names do not depend on the graph.
            options: further arguments of the wrapped tape's ``gradient``, for example ``unconnected_gradients``.

        Raises:
            as :func:`horovod.tensorflow.ops.allreduce.allreduce`.
        """
        gradients = super().gradient(target, sources, output_gradients, **options)
        flat, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        reduced = self._local_sources.reduce(flat, flat_sources, self._horovod, "DistributedGradientTape")
        mark(reduced, flat_sources, self._horovod.process_set)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradients of ``source``, a variable or tensor. Every rank calls it, before :meth:`gradient`."""
        self._local_sources.add(source)

    @unconverted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """As :meth:`gradient`, but returns two lists of (source, gradient): first the local sources, then the reduced ones."""
        flat_sources = tf.nest.flatten(sources)
        gradients = self.gradient(target, flat_sources, output_gradients, use_generic_names)
        pairs = list(zip(flat_sources, gradients, strict=True))
        local = [pair for pair in pairs if pair[0] in self._local_sources]
        return local, [pair for pair in pairs if pair[0] not in self._local_sources]


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make ``gradtape.gradient()`` return gradients that are reduced over the ranks.

    The returned tape is of a class derived from that of ``gradtape``, and shares its recording. In addition it has the methods
    ``register_local_source()`` and ``get_local_and_global_gradients()``.

    Args:
        gradtape: a ``tf.GradientTape``, inside or after its block.
        device_dense, device_sparse: the devices that dense and sparse results are put on.
        compression: one of ``hvd.Compression``; dense gradients are compressed before they are sent.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before they are reduced. Otherwise they are gathered.
        op: ``hvd.Average``, ``hvd.Sum`` or another reduction. ``hvd.Adasum`` combines the gradients themselves.
        gradient_predivide_factor: a number f. An Average divides gradients by f before the sum, and by size / f afterwards.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of variables whose gradients form one request. The default cuts by size.
        process_set: the ranks that reduce. Other ranks keep their own gradients.
        scale_local_gradients: divide the gradients of local sources by the number of ranks, as an average does.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is wrong. The text says which.
    """
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError("this tape is a DistributedGradientTape already; wrap the original")
    if not callable(getattr(gradtape, "gradient", None)):
        raise TypeError(f"expected a tf.GradientTape, not {shown(gradtape)}")
    groups = chosen_groups(groups, 0 if num_groups is None else whole(num_groups, "num_groups"))
    settings = TensorFlowReduction(
        op=reduction(op),
        predivide=gradient_predivide_factor,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    kind = type(gradtape)
    own = {
        "__doc__": kind.__doc__,
        "_horovod": settings,
        "_local_sources": LocalSources(process_set, scale_local_gradients),
    }
    derived: Any = type(kind.__name__, (_DistributedGradientTape, kind), own)
    wrapped = derived.__new__(derived)
    # Both tapes share one dictionary: with a copy, this tape would not know that the block of the other has ended.
    wrapped.__dict__ = vars(gradtape)
    return wrapped


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        local_layers: one or several Keras layers. They need not be built yet.
        others: as for :func:`DistributedGradientTape`.

    Raises:
        ValueError: ``local_layers`` contains something else. Otherwise as :func:`DistributedGradientTape`.
    """
    layers = checked_layers(local_layers, lambda each: isinstance(each, tf.keras.layers.Layer), "tf.keras.layers.Layer")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape._local_sources.add_layers(layers)
    return tape
