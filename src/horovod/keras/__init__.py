"""Horovod for Keras 3 on any backend (TensorFlow, PyTorch, JAX), and for Keras 2 with ``TF_USE_LEGACY_KERAS=1``.

Every rank runs a script with these lines::

    import horovod.keras as hvd
    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod._bindings.frameworks import missing as _missing

try:
    import keras  # so that the reason is clear before anything else fails
except Exception as error:
    raise _missing(error, "horovod.keras", "Keras 3.5 or newer", "keras") from error

from horovod._bindings import exported_names
from horovod._bindings.exported_names import *  # noqa: F403  every binding exports all of them
from horovod._bindings.local_variables import checked_layers as _checked_layers
from horovod._bindings.reductions import Adasum, Average, Sum
from horovod._keras import by_version as _by_version
from horovod._keras.backends import backend as _backend
from horovod._keras.custom_steps import reduce_gradients
from horovod._keras.legacy import versions as _versions
from horovod._keras.settings import checked as _checked
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.keras import callbacks, data, elastic
from horovod.local_training.outer_sgd import OuterSGD

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "OuterSGD",
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
    "reduce_gradients",
    "reducescatter",
    "shutdown",
]
__all__ += exported_names.__all__

if _backend.name() == "tensorflow":
    from horovod._keras.backends.tensorflow_values import allgather, allreduce, broadcast, reducescatter
    from horovod.tensorflow.lifecycle import init, shutdown
else:
    from horovod._keras.values import allgather, allreduce, broadcast, reducescatter
    from horovod.common.basics import init, shutdown

Compression = _backend.compression()
"""The choices for ``compression=``: ``none``, ``fp16`` and ``bf16``."""


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
    """Make an optimizer like ``optimizer`` whose steps use gradients that are reduced over the ranks. Every rank must call it.

    Returns an instance of a class derived from that of ``optimizer``, with the same class name, configuration and state, for
    ``model.compile``. Loss scaling, clipping and weight decay come after the reduction.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``. With ``TF_USE_LEGACY_KERAS=1``, also an optimizer of
            ``tf.keras.optimizers``, see :func:`horovod.tensorflow.keras.DistributedOptimizer`.
        name: the name of the distributed optimizer.
        device_dense, device_sparse: the devices that dense and sparse results are put on (TensorFlow).
        compression: one of ``hvd.Compression``, or a class with the same methods. Compresses gradients before they are sent.
        sparse_as_dense: make gradients of embeddings dense before they are reduced (TensorFlow).
        gradient_predivide_factor: a number f. An Average divides gradients by f before the sum, and by size / f afterwards.
        op: ``hvd.Average`` or ``hvd.Sum``.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of requests, or lists of variables whose gradients form one request.
        backward_passes_per_step: each rank accumulates gradients over this number of batches before they are reduced and
            applied. Keras's ``gradient_accumulation_steps`` does this.
        average_aggregated_gradients: average the accumulated gradients. Otherwise they are summed.
        process_set: the ranks that reduce. Other ranks step with their own gradients.
        scale_local_gradients: divide the gradients of variables passed to ``register_local_var`` by the number of ranks.

    Raises:
        ValueError, TypeError: an argument is wrong. The text says which.
        NotImplementedError: Keras does not train on its backend, or ``keras.distribution`` is in use.
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
            num_groups=num_groups,
            groups=groups,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        ),
        _versions.of_keras_2(optimizer, "optimizers"),
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
    """A :func:`DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        local_layers: one or several layers. They need not be built yet.
        others: as for :func:`DistributedOptimizer`.

    Raises:
        ValueError: ``local_layers`` contains something else. Otherwise as :func:`DistributedOptimizer`.
    """
    layers = _checked_layers(local_layers, _is_layer, "keras.layers.Layer")
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


def broadcast_global_variables(root_rank: int) -> None:
    """Not supported: Keras 3 has no graphs of TensorFlow 1.

    Raises:
        RuntimeError: always. The text says what to use instead.
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
    """Load a saved model, and make its optimizer a :func:`DistributedOptimizer`. The optimizer keeps its state.

    The file may have been saved with a distributed optimizer or a plain one.

    Args:
        filepath: a ``.keras`` or ``.h5`` file. With ``TF_USE_LEGACY_KERAS=1``, Keras 2 loads what it has saved.
        custom_optimizers: optimizer classes of the user.
        custom_objects: other objects of the user, by name.
        compression: as for :func:`DistributedOptimizer`.
        legacy_opts: accepted for compatibility.

    Returns:
        The loaded model. Nothing is communicated: if the ranks load different files, broadcast the variables afterwards.
    """
    settings = _checked(compression=compression)
    legacy_keras = _versions.legacy_tensorflow_keras()
    legacy = legacy_keras if legacy_keras is not None and _versions.saved_by_keras_2(filepath) else None
    return _by_version.load(filepath, custom_optimizers, custom_objects, settings, legacy)
