"""``DistributedOptimizer`` for optimizers of TensorFlow 1. Those of Keras are passed on to :mod:`horovod.tensorflow.keras`."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from horovod.common.basics import rank
from horovod.common.buckets import chosen_groups
from horovod.common.reductions import Adasum, Average, reduction
from horovod.common.scalars import positive_whole, whole
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.training.adasum_optimizer import _DistributedAdasumOptimizer
from horovod.tensorflow.training.gradients import Reduction, reduce_gradients
from horovod.tensorflow.training.local import LocalSources


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # untyped base
    """An optimizer of TensorFlow 1 whose ``compute_gradients()`` returns gradients reduced over the ranks.

    Args:
        optimizer: the wrapped optimizer, which does everything else.
        reduction: how gradients are reduced.
        passes: the number of backward passes whose gradients are added up before they are reduced.
        average_passes: whether the sum is divided by ``passes``.
        scale_local: as of :class:`horovod.tensorflow.training.local.LocalSources`.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: Reduction,
        passes: int,
        average_passes: bool,
        scale_local: bool,
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._local = LocalSources(reduction.process_set, scale_local)
        self._aggregation: LocalGradientAggregationHelper | None = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 is not supported for optimizers of TensorFlow 1 in eager execution; "
                    "use one of tf.keras.optimizers"
                )
            self._aggregation = LocalGradientAggregationHelper(
                passes,
                lambda gradients, variables: reduce_gradients(gradients, variables, reduction, name),
                reduction.sparse_as_dense,
                average_passes,
                rank(),
                process_set=reduction.process_set,
                scale_local_gradients=scale_local,
                name=name,
            )

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradients of a variable."""
        self._local.add(var)
        if self._aggregation is not None:
            self._aggregation.register_local_var(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's gradients, reduced over the ranks. Every rank must call it, or run the graph it is in."""
        computed = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in computed]
        variables = [variable for _, variable in computed]
        if self._aggregation is not None:
            reduced = self._aggregation.compute_gradients(gradients, variables)
        else:
            reduced = self._local.reduce(gradients, variables, self._reduction, self._name)
        return list(zip(reduced, variables, strict=True))

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients. If gradients are added up over several passes, they are applied only after the last pass."""
        if self._aggregation is None:
            return self._optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            return self._aggregation.apply_gradients(
                lambda: self._optimizer.apply_gradients(pairs, *args, **kwargs), self._optimizer, *args, **kwargs
            )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """That of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """That of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """That of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make ``optimizer`` use gradients that are reduced over the ranks. Every rank must wrap the same kind of optimizer.

    Args:
        optimizer: an optimizer of ``tf.compat.v1.train``, or of ``tf.keras.optimizers``. For the latter see
            :func:`horovod.tensorflow.keras.DistributedOptimizer`.
        name: the name of the new optimizer.
        use_locking: as of ``tf.compat.v1.train.Optimizer``.
        device_dense, device_sparse: the devices that dense and sparse results are put on.
        compression: one of ``hvd.Compression``; dense gradients are compressed before they are sent.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before they are reduced. Otherwise they are gathered.
        backward_passes_per_step: gradients are added up locally over this many passes before they are reduced.
        op: ``hvd.Average``, ``hvd.Sum`` or another reduction. With ``hvd.Adasum`` every rank makes its own steps, and the
            changes of variables are combined, see :mod:`horovod.tensorflow.training.adasum_optimizer`. Adasum is supported
            for ``tf.compat.v1.train`` only.
        gradient_predivide_factor: f: an Average divides gradients by f before the sum, and by size / f afterwards.
        average_aggregated_gradients: divide the local sums by ``backward_passes_per_step``.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of variables whose gradients form one request. The default cuts by size.
        process_set: the ranks that reduce. Other ranks step with their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks, as an average does.

    Raises:
        ValueError, NotImplementedError: an argument is wrong. The text says which.
    """
    chosen = reduction(op)
    if chosen == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    groups = chosen_groups(groups, whole(num_groups, "num_groups"), stacklevel=2)
    backward_passes_per_step = positive_whole(backward_passes_per_step, "backward_passes_per_step")
    settings = Reduction(
        op=chosen,
        predivide=gradient_predivide_factor,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    if isinstance(optimizer, _DistributedOptimizer | _DistributedAdasumOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap the original")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if chosen == Adasum:
            return _DistributedAdasumOptimizer(optimizer, name, use_locking, compression, backward_passes_per_step)
        return _DistributedOptimizer(
            optimizer,
            name,
            use_locking,
            settings,
            backward_passes_per_step,
            average_aggregated_gradients,
            scale_local_gradients,
        )
    if chosen == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    keras = importlib.import_module("horovod.tensorflow.keras")  # which is built on this package
    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=chosen,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
