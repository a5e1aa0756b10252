"""``hvd.DistributedOptimizer`` of ``horovod.tensorflow``: for optimizers of TensorFlow 1 and of Keras.

It imports the modules of both, so only ``horovod.tensorflow`` itself imports it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._bindings.bucket_division import chosen_groups
from horovod._bindings.reductions import Adasum, Average, reduction
from horovod._bindings.scalars import positive_whole, whole
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.optimizer import _DistributedOptimizer
from horovod.tensorflow.training.adasum_optimizer import _DistributedAdasumOptimizer
from horovod.tensorflow.training.gradients import TensorFlowReduction


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
        use_locking: as for ``tf.compat.v1.train.Optimizer``.
        device_dense, device_sparse: the devices that dense and sparse results are put on.
        compression: one of ``hvd.Compression``; dense gradients are compressed before they are sent.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before they are reduced. Otherwise they are gathered.
        backward_passes_per_step: each rank adds up its gradients over this many passes before they are reduced.
        op: ``hvd.Average``, ``hvd.Sum`` or another reduction. With ``hvd.Adasum`` every rank makes its own steps, and Adasum
            combines the changes of variables, see :mod:`horovod.tensorflow.training.adasum_optimizer`. Adasum
            supports only optimizers of ``tf.compat.v1.train``.
        gradient_predivide_factor: a number f. An Average divides gradients by f before the sum, and by size / f afterwards.
        average_aggregated_gradients: divide the local sums by ``backward_passes_per_step``.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of variables whose gradients form one request. The default cuts by size.
        process_set: the ranks that reduce. Other ranks step with their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks, as an average does.

    Returns:
        An optimizer of the same kind: of TensorFlow 1 or of Keras.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is wrong. The text says which.
    """
    chosen = reduction(op)
    if chosen == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    groups = chosen_groups(groups, 0 if num_groups is None else whole(num_groups, "num_groups"))
    backward_passes_per_step = positive_whole(backward_passes_per_step, "backward_passes_per_step")
    settings = TensorFlowReduction(
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
    from horovod.tensorflow.keras import DistributedOptimizer as of_keras  # here, since Keras takes a second to import

    return of_keras(
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
