"""Horovod for ``tf.keras``: Keras 3 on its TensorFlow backend, or Keras 2 with ``TF_USE_LEGACY_KERAS=1``.

Every rank runs a script with these lines::

    import horovod.tensorflow.keras as hvd
    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as _tf

from horovod._bindings import exported_names
from horovod._bindings.exported_names import *  # noqa: F403  every binding exports all of them
from horovod._bindings.reductions import Average, Sum
from horovod._keras import by_version as _by_version
from horovod._keras.backends.tensorflow_values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horovod._keras.custom_steps import reduce_gradients
from horovod._keras.settings import checked as _checked
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.tensorflow import data
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks, elastic
from horovod.tensorflow.keras.keras_version import LEGACY as _LEGACY
from horovod.tensorflow.lifecycle import init, shutdown

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "data",
    "elastic",
    "init",
    "load_model",
    "reduce_gradients",
    "reducescatter",
    "shutdown",
]
__all__ += exported_names.__all__


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer like ``optimizer`` whose steps use gradients that are reduced over the ranks. Every rank must call it.

    Arguments and errors as :func:`horovod.keras.DistributedOptimizer`. With Keras 2, gradients are reduced in ``minimize``,
    which ``fit`` calls, and in ``apply_gradients`` if they are not reduced by then, for example by a
    :func:`horovod.tensorflow.DistributedGradientTape`. The state of a Keras 2 optimizer is not copied.
    """
    return _by_version.distribute(
        optimizer,
        _checked(
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        ),
        _LEGACY,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model, and make its optimizer a :func:`DistributedOptimizer`. The optimizer keeps its state.

    Arguments as :func:`horovod.keras.load_model`. Keras 2 also reads folders in TensorFlow's SavedModel format.
    """
    settings = _checked(compression=compression)
    return _by_version.load(filepath, custom_optimizers, custom_objects, settings, _tf.keras if _LEGACY else None)
