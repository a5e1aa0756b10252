"""Elastic training with ``tf.keras``, Keras 2 or 3, in ``fit``.

Every rank runs a script with these lines::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]

    @hvd.elastic.run
    def train(state):
        model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=callbacks)

    train(state)
"""

from __future__ import annotations

import tensorflow as tf

from horovod._keras import elastic
from horovod._models.state import ModelState
from horovod.tensorflow.lifecycle import init, shutdown

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

run = elastic.make_run(shutdown, init)
"""Decorate a training function so that it continues when ranks are lost, added or removed. Its first argument is the state."""


class KerasState(ModelState):
    __doc__ = ModelState.__doc__


class CommitStateCallback(elastic.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = elastic.CommitState.__doc__


class UpdateBatchStateCallback(elastic.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]  # as above
    __doc__ = elastic.UpdateBatchState.__doc__


class UpdateEpochStateCallback(elastic.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]  # as above
    __doc__ = elastic.UpdateEpochState.__doc__
