"""Train a Keras model on handwritten digits with ``fit``, in a job whose processes may change while it runs.

    horovodrun -np 2 python examples/tensorflow2_keras_mnist_elastic.py

The numbered lines make the program elastic. Without an elastic launcher it trains with the processes that it was started with.
The data are the 1,797 digits of 8 x 8 pixels that come with scikit-learn; no network is needed.

Needs the extras ``tensorflow`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

TRAINING = 1437


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="of all processes together (default: 96)")
    options = parser.parse_args()

    hvd.init()
    tf.keras.utils.set_random_seed(1)
    images, labels = load()
    digits = tf.data.Dataset.from_tensor_slices((images[:TRAINING], labels[:TRAINING]))
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.002)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)  # 1: the model, and where training is
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),  # 2: a failure costs five batches at most
    ]

    @hvd.elastic.run  # 3: called again after each change, with the state that all processes have
    def train(state: Any) -> None:
        batch = options.batch_size // hvd.size()
        validation = hvd.data.shard((images[TRAINING:].numpy(), labels[TRAINING:].numpy()))
        while state.epoch < options.epochs:
            # 4: one order for all processes; the rest of an interrupted epoch is divided among the present ones
            order = digits.shuffle(TRAINING, seed=state.epoch + 1, reshuffle_each_iteration=False)
            model.fit(
                hvd.data.shard(order.skip(state.batch * options.batch_size), batch, drop_remainder=True),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                validation_data=validation,
                shuffle=False,
                callbacks=callbacks,
                verbose=2 if hvd.rank() == 0 else 0,
            )

    train(state)


def load() -> tuple[tf.Tensor, tf.Tensor]:
    """Images, float32 (1797, 8, 8, 1), from 0 to 1, and their labels, int64 (1797,)."""
    digits = load_digits()
    return tf.constant(digits.images[..., None] / 16, tf.float32), tf.constant(digits.target, tf.int64)


if __name__ == "__main__":
    main()
