"""The version of ``tf.keras``: Keras 3, or Keras 2 with ``TF_USE_LEGACY_KERAS=1``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras.settings import KerasSettings

LEGACY = str(getattr(tf.keras, "__version__", "2")).startswith("2")
"""Whether ``tf.keras`` is Keras 2, whose module has no ``__version__``."""

if not LEGACY and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"horovod.tensorflow.keras needs Keras to run on TensorFlow, but KERAS_BACKEND is {tf.keras.backend.backend()!r}; "
        "import horovod.keras instead, which works on every backend"
    )


def distribute(optimizer: Any, settings: KerasSettings) -> Any:
    """Make an optimizer of either version distributed."""
    if LEGACY:
        from horovod._keras.legacy import optimizer as legacy_optimizer

        return legacy_optimizer.distribute(optimizer, settings)
    from horovod._keras import optimizer as of_keras_3

    return of_keras_3.distribute(optimizer, settings)


def load(filepath: Any, custom_optimizers: Any, custom_objects: Any, settings: KerasSettings) -> Any:
    """Load a model with the version of Keras that ``tf.keras`` is, and make its optimizer distributed."""
    if LEGACY:
        from horovod._keras.legacy import optimizer as legacy_optimizer

        return legacy_optimizer.load(tf.keras, filepath, custom_optimizers, custom_objects, settings)
    from horovod._keras import loading

    return loading.load(filepath, custom_optimizers, custom_objects, settings)
