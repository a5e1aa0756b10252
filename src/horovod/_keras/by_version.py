"""Makes optimizers distributed and loads models, with the code for their version of Keras: 3, or 2 (``tf_keras``).

Only that code is imported, with its Keras.
"""

from __future__ import annotations

from typing import Any

from horovod._keras.settings import KerasSettings


def distribute(optimizer: Any, settings: KerasSettings, legacy: bool) -> Any:
    """A distributed optimizer with the configuration of ``optimizer``; of Keras 3, also with its state.

    Args:
        legacy: whether the optimizer is of Keras 2.
    """
    if legacy:
        from horovod._keras.legacy import optimizer as of_keras_2

        return of_keras_2.distribute(optimizer, settings)
    from horovod._keras import optimizer as of_keras_3

    return of_keras_3.distribute(optimizer, settings)


def load(
    filepath: Any, custom_optimizers: Any, custom_objects: Any, settings: KerasSettings, legacy: Any = None
) -> Any:
    """Load a model, and make its optimizer distributed.

    Args:
        legacy: the module of Keras 2 that loads it; None: Keras 3 does.
    """
    if legacy is not None:
        from horovod._keras.legacy import optimizer as of_keras_2

        return of_keras_2.load(legacy, filepath, custom_optimizers, custom_objects, settings)
    from horovod._keras import loading

    return loading.load(filepath, custom_optimizers, custom_objects, settings)
