"""Horovod for Keras 3, on whichever backend it runs (TensorFlow, PyTorch, JAX), and for Keras 2 with TF_USE_LEGACY_KERAS=1::

import horovod.keras as hvd
hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=...)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from horovod._keras.backends import backend as _backend
from horovod._keras.legacy import versions as _versions
from horovod._keras.settings import checked as _checked
from horovod.common import interface
from horovod.common.interface import *  # noqa: F403
from horovod.common.reductions import Adasum, Average, Sum
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.keras import callbacks, data, elastic

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
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
    "reducescatter",
    "shutdown",
]
__all__ += interface.__all__

if _backend.name() == "tensorflow":
    from horovod._keras.backends.tensorflow_values import allgather, allreduce, broadcast, reducescatter
    from horovod.tensorflow.lifecycle import init, shutdown
else:
    from horovod._keras.values import allgather, allreduce, broadcast, reducescatter
    from horovod.common.basics import init, shutdown

Compression = _backend.compression()


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer like ``optimizer`` whose steps use gradients that are reduced over the ranks. Every rank calls it.

    Returns an instance of a class derived from ``optimizer``'s, of its name, with its configuration and state, for
    ``model.compile``. Whatever Keras does with gradients (loss scaling, clipping, weight decay) comes after the reduction.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``; where TensorFlow's Keras is Keras 2 (``TF_USE_LEGACY_KERAS=1``), also one
            of ``tf.keras.optimizers``: then as :func:`horovod.tensorflow.keras.DistributedOptimizer`.
        name: of the distributed optimizer.
        device_dense, device_sparse: accepted for compatibility.
        compression: how gradients travel: one of ``hvd.Compression``, or a class with its two methods.
        sparse_as_dense: make gradients of embeddings dense before they are reduced (TensorFlow).
        gradient_predivide_factor: splits an Average: gradients are divided by it before the sum, and by size / it after.
        op: ``hvd.Average`` or ``hvd.Sum``.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of requests to cut the gradients into, or lists of variables that travel together.
        backward_passes_per_step: gradients accumulate locally over this many batches before they are reduced and applied,
            by Keras's own ``gradient_accumulation_steps``.
        average_aggregated_gradients: accumulate means, not sums.
        process_set: reduce over these ranks only; other ranks step with their own gradients.
        scale_local_gradients: divide gradients of variables given to ``register_local_var`` by the number of ranks.

    Raises:
        ValueError: an argument is wrong; the text says which.
    """
    return _distribute(
        optimizer,
        _checked(
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            num_groups=num_groups,
            groups=groups,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        ),
    )


def PartialDistributedOptimizer(
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
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedOptimizer` that leaves the weights of some layers to each rank.

    Args:
        local_layers: a layer or layers; they need not be built yet.
        others: as for :func:`DistributedOptimizer`.

    Raises:
        ValueError: as there; or ``local_layers`` has something else in it.
    """
    layers = [local_layers] if _is_layer(local_layers) else local_layers or []
    if not isinstance(layers, Iterable):
        raise ValueError("All local layers must be of keras.layers.Layer type.")
    layers = list(layers)
    if not all(_is_layer(layer) for layer in layers):
        raise ValueError("All local layers must be of keras.layers.Layer type.")
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    made._horovod.keep_layers_local(layers)
    return made


def _is_layer(thing: Any) -> bool:
    return isinstance(thing, keras.layers.Layer) or _versions.of_keras_2(thing, "layers")


def _distribute(optimizer: Any, settings: Any) -> Any:
    if _versions.of_keras_2(optimizer, "optimizers"):
        from horovod._keras.legacy import optimizer as legacy_optimizer

        return legacy_optimizer.distribute(optimizer, settings)
    from horovod._keras import optimizer as of_keras_3

    return of_keras_3.distribute(optimizer, settings)


def broadcast_global_variables(root_rank: int) -> None:
    """For graphs of TensorFlow 1, which Keras 3 has none of.

    Raises:
        RuntimeError: always; the text says what to use.
    """
    raise RuntimeError(
        "broadcast_global_variables() does not support eager execution: Keras 3 keeps no list of all variables. "
        f"Pass hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) to fit."
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model saved with Keras; its optimizer is a :func:`DistributedOptimizer` afterwards and goes on where it was.

    The file may have been saved with a distributed optimizer or a plain one.

    Args:
        filepath: a ``.keras`` or ``.h5`` file; where TensorFlow's Keras is Keras 2, what that has saved is read with it.
        custom_optimizers: classes of the user's own.
        custom_objects: other things of the user's own, by name.
        compression: as for :func:`DistributedOptimizer`.
        legacy_opts: accepted for compatibility; it concerns Keras 2.
    """
    settings = _checked(compression=compression)
    legacy_keras = _versions.legacy_tensorflow_keras()
    if legacy_keras is not None and _versions.saved_by_keras_2(filepath):
        from horovod._keras.legacy import optimizer as legacy_optimizer

        return legacy_optimizer.load(legacy_keras, filepath, custom_optimizers, custom_objects, settings)
    from horovod._keras import loading

    return loading.load(filepath, custom_optimizers, custom_objects, settings)
