"""The framework that Keras 3 runs on, and the reduction and compression of gradients on it."""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras.distribution import Reducer
from horovod._keras.settings import KerasSettings


def name() -> str:
    """``tensorflow``, ``torch`` or ``jax``. It cannot change after Keras is imported."""
    return str(keras.backend.backend())


def traced() -> bool:
    """Whether the caller is being traced, or may be (JAX). A trace executes both branches of a condition."""
    if name() == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    return name() == "jax"


def compression() -> Any:
    """The choices for ``compression=``."""
    if name() == "tensorflow":
        from horovod.tensorflow.compression import Compression as of_tensorflow

        return of_tensorflow
    if name() == "torch":
        from horovod.torch.compression import Compression as of_torch

        return of_torch
    from horovod._keras.backends.jax_backend import Compression as of_jax

    return of_jax


def reducer(settings: KerasSettings) -> Reducer:
    """The reducer of the backend.

    Raises:
        NotImplementedError: Keras cannot train on its backend.
    """
    if name() == "tensorflow":
        from horovod._keras.backends.tensorflow_backend import TensorFlowReducer

        made: Reducer = TensorFlowReducer(settings)
    elif name() == "torch":
        from horovod._keras.backends.torch_backend import TorchReducer

        made = TorchReducer(settings)
    elif name() == "jax":
        from horovod._keras.backends.jax_backend import JaxReducer

        made = JaxReducer(settings)
    else:
        raise NotImplementedError(f"Keras does not train on {name()}; set KERAS_BACKEND to tensorflow, jax or torch")
    return made
