"""Saves a distributed optimizer under the name of the optimizer that it wraps.

Plain Keras can therefore load a file that a job with many ranks has saved, without Horovod. ``hvd.load_model`` makes the
optimizer distributed again.
"""

from __future__ import annotations

from typing import Any


def save_as(made: type[Any], kind: type[Any]) -> None:
    """Have Keras 3 write instances of ``made`` as it writes those of ``kind``.

    Keras looks up the name of a class in two tables: one of its own classes, and one of the classes that users registered.
    The variants of its optimizers for PyTorch (``keras.src.backend.torch...``) have the name of their base class.
    """
    from keras.src.api_export import REGISTERED_OBJS_TO_NAMES as keras_names
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES as users_names

    public = kind
    if kind not in keras_names and kind.__module__.startswith("keras.src.backend."):
        public = next((base for base in kind.__mro__ if base in keras_names), kind)
    if public in keras_names:
        keras_names[made] = keras_names[public]
    elif kind in users_names:
        users_names[made] = users_names[kind]
