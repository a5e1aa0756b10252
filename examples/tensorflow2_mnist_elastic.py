"""Train a network on handwritten digits with TensorFlow in a job whose processes may change while it runs.

    horovodrun -np 2 python examples/tensorflow2_mnist_elastic.py

It is examples/tensorflow2_mnist.py made elastic; the numbered lines are new. Without an elastic launcher it trains with the
processes that it was started with.

Needs the extras ``tensorflow`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

TRAINING = 1437


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="of all processes together (default: 96)")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    options = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    tf.keras.utils.set_random_seed(1)
    images, labels = load()
    digits = tf.data.Dataset.from_tensor_slices((images[:TRAINING], labels[:TRAINING]))
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(options.learning_rate)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # 1: the model and its optimizer, and where training is: the epoch, and how many digits of it are done
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, done=0)

    @hvd.elastic.run  # 2: called again after each change, with the state that all processes have
    def train(state: Any) -> None:
        batch = options.batch_size // hvd.size()
        while state.epoch < options.epochs:
            # 3: one order for all processes, whose beginning is done; the rest is divided among the present ones
            order = digits.shuffle(TRAINING, seed=state.epoch + 1, reshuffle_each_iteration=False)
            losses = []
            if TRAINING - state.done >= options.batch_size:
                for x, y in hvd.data.shard(order.skip(state.done), batch, drop_remainder=True):
                    losses.append(step(x, y))
                    state.done += batch * hvd.size()
                    state.commit()  # 4: a failure only loses the work after this line
            state.epoch, state.done = state.epoch + 1, 0
            loss = hvd.allreduce(tf.reduce_mean(losses)) if losses else float("nan")
            scores = model(images[TRAINING:], training=False)
            right = tf.reduce_mean(tf.cast(tf.argmax(scores, axis=1) == labels[TRAINING:], tf.float32))
            if hvd.rank() == 0:
                print(
                    f"epoch {state.epoch}: training loss {float(loss):.4f}, test accuracy {float(right):.2%}",
                    flush=True,
                )

    train(state)


def load() -> tuple[tf.Tensor, tf.Tensor]:
    """Images, float32 (1797, 8, 8, 1), from 0 to 1, and their labels, int64 (1797,)."""
    digits = load_digits()
    return tf.constant(digits.images[..., None] / 16, tf.float32), tf.constant(digits.target, tf.int64)


if __name__ == "__main__":
    main()
