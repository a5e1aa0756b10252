"""How a distributed optimizer is called in files: as the optimizer that it wraps.

So a file that was saved while training on many ranks is loaded by plain Keras, anywhere, without Horovod; and
``hvd.load_model`` makes its optimizer distributed again.
"""

from __future__ import annotations

from typing import Any


def save_as(made: type[Any], kind: type[Any]) -> None:
    """Have Keras 3 write instances of ``made`` as it writes those of ``kind``.

    Keras asks two tables for the name of a class: one of its own classes, one of those that users registered. PyTorch's
    variants of its optimizers (``keras.src.backend.torch...``) go by the name of what they are variants of.
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
