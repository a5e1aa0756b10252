"""The parts that ``horovod.keras`` and ``horovod.tensorflow.keras`` share: distributed optimizer, callbacks, loading of models.

There are separate files for Keras 3 on its backends (TensorFlow, PyTorch, JAX) and for Keras 2 (``tf_keras``). No module here
imports Keras or a framework that the script does not use already. The two packages choose the version of Keras. The classes of
distributed optimizers have this package as their ``__module__``, by which scripts recognise them.
"""

from __future__ import annotations

from typing import Any


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    **settings: Any,
) -> Any:
    """``DistributedOptimizer`` for projects that pass their own Keras module. Every rank must call it.

    Args:
        keras: ``keras``, ``tf.keras`` or ``tf_keras``.
        optimizer: an optimizer of that module.
        name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor: as for
            :func:`horovod.tensorflow.keras.DistributedOptimizer`.
        settings: the other arguments of :func:`horovod.tensorflow.keras.DistributedOptimizer`, by name.

    Raises:
        ValueError, TypeError: an argument is wrong. The text says which.
    """
    from horovod._keras.by_version import distribute
    from horovod._keras.settings import checked

    if hasattr(keras, "ops"):
        from horovod._keras.backends.backend import compression as choices
    else:
        from horovod.tensorflow.compression import Compression

        def choices() -> Any:
            return Compression

    return distribute(
        optimizer,
        checked(
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=choices().none if compression is None else compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            **settings,
        ),
        legacy=not hasattr(keras, "ops"),
    )
