"""``DistributedGradientTape``: a gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod.common.buckets import chosen_groups
from horovod.common.reductions import Average, reduction
from horovod.common.scalars import whole
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import shown
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.training.gradients import Reduction
from horovod.tensorflow.training.local import LocalSources
from horovod.tensorflow.training.reduced_marks import mark


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]  # untyped base
    """The methods in front of the wrapped tape's own. Never instantiated under this name."""

    _horovod: Reduction
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
        """The gradients of ``target``, reduced over the ranks; those of local sources stay this rank's own.

        Every member of the process set calls it for the like sources, in the same order. A distributed optimizer of Keras
        applies what it returns as it is, if it reduces over the same process set.

        Args:
            sources: variables or tensors, in any structure; the result has the same.
            use_generic_names: accepted for compatibility; names do not depend on the graph.
            options: what else the wrapped tape's ``gradient`` takes, for example ``unconnected_gradients``.

        Raises:
            as :func:`horovod.tensorflow.ops.allreduce.allreduce`.
        """
        gradients = super().gradient(target, sources, output_gradients, **options)
        flat, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        reduced = self._local_sources.reduce(flat, flat_sources, self._horovod, "DistributedGradientTape")
        mark(reduced, flat_sources, self._horovod.process_set)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of a variable or tensor to each rank."""
        self._local_sources.add(source)

    @unconverted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """As :meth:`gradient`, but two lists of (source, gradient): those of local sources, and the reduced ones."""
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

    Returns a tape of a class derived from ``gradtape``'s, which shares what was recorded. It has in addition
    ``register_local_source()`` and ``get_local_and_global_gradients()``.

    Args:
        gradtape: a ``tf.GradientTape``, inside or after its block.
        device_dense, device_sparse: where results are put.
        compression: how dense gradients travel.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before they are reduced; otherwise they are gathered.
        op: ``hvd.Average``, ``hvd.Sum`` or another reduction; ``hvd.Adasum`` combines the gradients themselves.
        gradient_predivide_factor: splits an Average: gradients are divided by it before the sum, and by size / it after.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of variables that travel together; default: buckets by size.
        process_set: reduce over these ranks only; others keep their own gradients.
        scale_local_gradients: divide gradients of local sources by the number of ranks, as an average would.

    Raises:
        ValueError, NotImplementedError: an argument is wrong; the text says which.
    """
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError("this tape is a DistributedGradientTape already; wrap the original")
    if not callable(getattr(gradtape, "gradient", None)):
        raise TypeError(f"expected a tf.GradientTape, not {shown(gradtape)}")
    groups = chosen_groups(groups, whole(num_groups, "num_groups"), stacklevel=2)
    how = Reduction(
        reduction(op),
        gradient_predivide_factor,
        compression,
        sparse_as_dense,
        groups,
        process_set,
        device_dense,
        device_sparse,
    )
    kind = type(gradtape)
    derived: Any = type(kind.__name__, (_DistributedGradientTape, kind), {"__doc__": kind.__doc__})
    wrapped = derived.__new__(derived)
    wrapped.__dict__.update(vars(gradtape))
    wrapped._horovod = how
    wrapped._local_sources = LocalSources(process_set, scale_local_gradients)
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
    """A :func:`DistributedGradientTape` that leaves the gradients of some layers to each rank.

    Args:
        local_layers: a Keras layer or several, built, whose trainable weights are not reduced. The others as there.

    Raises:
        ValueError: ``local_layers`` has something else in it; otherwise as there.
    """
    if local_layers is None:
        local_layers = []
    elif isinstance(local_layers, tf.keras.layers.Layer):
        local_layers = [local_layers]
    if not isinstance(local_layers, Iterable):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    local_layers = list(local_layers)
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in local_layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
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
    for layer in local_layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
