"""Elastic training with Keras on any of its backends, in ``fit``.

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

from horovod._keras import elastic
from horovod._keras.backends import backend
from horovod._models.state import ModelState
from horovod.keras.callbacks import _Callback

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

if backend.name() == "tensorflow":
    from horovod.tensorflow.lifecycle import init, shutdown
else:
    from horovod.common.basics import init, shutdown

run = elastic.make_run(shutdown, init)
"""Decorate a training function so that it continues when ranks are lost, added or removed. Its first argument is the state."""


class KerasState(ModelState):
    __doc__ = ModelState.__doc__


class CommitStateCallback(elastic.CommitState, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = elastic.CommitState.__doc__


class UpdateBatchStateCallback(elastic.UpdateBatchState, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = elastic.UpdateBatchState.__doc__


class UpdateEpochStateCallback(elastic.UpdateEpochState, _Callback):  # type: ignore[misc]  # Keras is untyped
    __doc__ = elastic.UpdateEpochState.__doc__
