"""Callbacks for models that train on many ranks, for Keras on any of its backends.

Every rank must pass the same callbacks to ``fit``, with those of this module first.
"""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras import callbacks, local_training
from horovod._keras.legacy import versions

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalTrainingCallback",
    "MetricAverageCallback",
]


def _base() -> Any:
    """The base class of callbacks. If TensorFlow's Keras is Keras 2, it is derived from the classes of both versions."""
    legacy = versions.legacy_tensorflow_keras()
    bases = (keras.callbacks.Callback,) if legacy is None else (keras.callbacks.Callback, legacy.callbacks.Callback)
    return type("Callback", bases, {})


_Callback: Any = _base()


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariables, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(callbacks.MetricAverage, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(callbacks.LearningRateSchedule, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(callbacks.LearningRateWarmup, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.LearningRateWarmup.__doc__


class LocalTrainingCallback(local_training.LocalTraining, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = local_training.LocalTraining.__doc__


class BestModelCheckpoint(callbacks.BestModel, keras.callbacks.ModelCheckpoint, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.BestModel.__doc__

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch"
    ) -> None:
        super().__init__(monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
