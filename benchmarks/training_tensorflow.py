"""The steps that ``training.py`` measures of TensorFlow: a custom loop around a model of Keras 3, compiled to a graph.

The peer is ``tf.distribute.MultiWorkerMirroredStrategy``, used as its guide for custom loops has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from training_arrangements import MWMS, UNDER_HOROVODRUN, Training, timed
from workloads_keras import WORKLOADS


def prepare(arrangement: str, model_name: str) -> Training:
    """The training step as the arrangement's users write it."""
    use_one_thread()
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if arrangement == MWMS else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        workload = WORKLOADS[model_name]()
        optimizer = tf.keras.optimizers.SGD(1e-3, momentum=0.9)
        optimizer.build(workload.model.trainable_variables)
    make = horovod_step if arrangement in UNDER_HOROVODRUN else plain_step
    step = make(workload.model, optimizer, strategy.num_replicas_in_sync if strategy else 1)
    inputs, targets = workload.inputs, workload.targets
    if strategy:
        local_step = step

        @tf.function
        def step(inputs: tf.Tensor, targets: tf.Tensor) -> Any:
            return strategy.run(local_step, (inputs, targets))

    return Training(timed(lambda: step(inputs, targets)), workload.parameters, workload.tensors)


def use_one_thread() -> None:
    """One thread within an operation and one between operations, and no GPU. To be called before TensorFlow does anything."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    tf.random.set_seed(1)


def loss_of(model: Any, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    losses = tf.keras.losses.sparse_categorical_crossentropy(targets, model(inputs, training=True), from_logits=True)
    return tf.reduce_mean(losses)


def plain_step(model: Any, optimizer: Any, replicas: int) -> Callable[..., Any]:
    """A step without Horovod; under a strategy, which adds gradients up, its part of one replica."""

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs, targets)
            if replicas > 1:
                loss /= replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def horovod_step(model: Any, optimizer: Any, _: int) -> Callable[..., Any]:
    """The same with a distributed tape."""
    import horovod.tensorflow as hvd  # here, so that the plain arrangements are without it

    hvd.init()

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs, targets)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return step
