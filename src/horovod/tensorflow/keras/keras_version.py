"""The version of ``tf.keras``: Keras 3, or Keras 2 with ``TF_USE_LEGACY_KERAS=1``."""

from __future__ import annotations

import tensorflow as tf

LEGACY = str(getattr(tf.keras, "__version__", "2")).startswith("2")
"""Whether ``tf.keras`` is Keras 2, whose module has no ``__version__``."""

if not LEGACY and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"horovod.tensorflow.keras needs Keras to run on TensorFlow, but KERAS_BACKEND is {tf.keras.backend.backend()!r}; "
        "import horovod.keras instead, which works on every backend"
    )
