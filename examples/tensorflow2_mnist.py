"""Train a network on handwritten digits with TensorFlow, in a custom training loop, on any number of processes.

    horovodrun -np 2 python examples/tensorflow2_mnist.py

The numbered lines make it a distributed program. The data are the 1,797 digits of 8 x 8 pixels that come
with scikit-learn; no network is needed.

Needs the extras ``tensorflow`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

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

    hvd.init()  # 1
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(
            gpus[hvd.local_rank() % len(gpus)], "GPU"
        )  # 2: each process uses its own GPU, if there are GPUs
    tf.keras.utils.set_random_seed(hvd.rank())
    images, labels = load()
    digits = tf.data.Dataset.from_tensor_slices((images[:TRAINING], labels[:TRAINING]))
    # 3: every process takes each hvd.size()-th digit, and hvd.size() processes share a batch
    mine = hvd.data.shard(digits, options.batch_size // hvd.size(), shuffle=True, drop_remainder=True)
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
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # 4: gradients are averages over all processes
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(
        model.variables + optimizer.variables, root_rank=0
    )  # 5: all processes start from the same values

    for epoch in range(1, options.epochs + 1):
        losses = [step(*batch) for batch in mine]
        loss = hvd.allreduce(tf.reduce_mean(losses))  # 6: the average over all processes
        scores = model(images[TRAINING:], training=False)
        right = tf.reduce_mean(tf.cast(tf.argmax(scores, axis=1) == labels[TRAINING:], tf.float32))
        if hvd.rank() == 0:  # 7: one process prints
            print(f"epoch {epoch}: training loss {float(loss):.4f}, test accuracy {float(right):.2%}", flush=True)


def load() -> tuple[tf.Tensor, tf.Tensor]:
    """Images, float32 (1797, 8, 8, 1), from 0 to 1, and their labels, int64 (1797,)."""
    digits = load_digits()
    return tf.constant(digits.images[..., None] / 16, tf.float32), tf.constant(digits.target, tf.int64)


if __name__ == "__main__":
    main()
