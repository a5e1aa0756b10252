"""Callbacks for models that train on many ranks, for ``tf.keras``, Keras 2 or 3.

Every rank must pass the same callbacks to ``fit``, with those of this module first.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras import callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariables, tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(callbacks.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(callbacks.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(callbacks.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.LearningRateWarmup.__doc__


class BestModelCheckpoint(callbacks.BestModel, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]  # Keras is untyped
    __doc__ = callbacks.BestModel.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            monitor=monitor, verbose=verbose, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq
        )
