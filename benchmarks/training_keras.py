"""The steps that ``training.py`` measures of Keras: ``fit``, on the TensorFlow backend.

A turn is one call of ``fit``. Its clock is a callback that starts when the first step has ended and stops with the last, so
what ``fit`` does once is not counted, and what it does in every step is.

The peer is ``fit`` under ``tf.distribute.MultiWorkerMirroredStrategy`` with Keras 2, for Keras 3 cannot do it: before its first
step it asks the strategy for the mean of a batch over the processes, and TensorFlow refuses ("Attempt to convert a value
(PerReplica...) with an unsupported type"; Keras 3.15 on TensorFlow 2.21, https://github.com/keras-team/keras/issues/20585).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import tensorflow as tf
from training_arrangements import MWMS, UNDER_HOROVODRUN, Training
from training_tensorflow import use_one_thread
from workloads_keras import WORKLOADS


def prepare(arrangement: str, model_name: str) -> Training:
    """The training step as the arrangement's users write it."""
    use_one_thread()
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if arrangement == MWMS else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        workload = WORKLOADS[model_name]()
        model = workload.model
        optimizer = tf.keras.optimizers.SGD(1e-3, momentum=0.9)
        at_start = []
        if arrangement in UNDER_HOROVODRUN:
            import horovod.keras as hvd  # here, so that the plain arrangements are without it

            hvd.init()
            optimizer = hvd.DistributedOptimizer(optimizer)
            at_start.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    endless = tf.data.Dataset.from_tensors((workload.inputs, workload.targets)).repeat()
    dataset = endless
    if strategy:  # a batch for each process, not one that they share
        dataset = strategy.distribute_datasets_from_function(lambda _: endless)

    def run(steps: int) -> float:
        clock = Clock(steps)
        model.fit(dataset, steps_per_epoch=1 + steps, verbose=0, shuffle=False, callbacks=[*at_start, clock])
        at_start.clear()
        return clock.seconds

    return Training(run, workload.parameters, workload.tensors)


class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]  # untyped base
    """Times the steps of an epoch but for the first.

    Attributes:
        seconds: that they took.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.seconds = 0.0
        self._steps = steps
        self._started = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._started = time.perf_counter()
        if batch == self._steps:
            self.seconds = time.perf_counter() - self._started
