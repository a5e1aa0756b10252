"""Train a Keras model on handwritten digits with ``fit``, on any number of processes and any back end of Keras.

    horovodrun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch horovodrun -np 2 python examples/keras_digits.py    # or jax, if it is installed

The numbered lines make it a distributed program. On GPUs, each process also chooses its own before anything else runs; how
depends on the back end (docs/keras.md).

The data are the 1,797 digits of 8 by 8 pixels that come with scikit-learn; no network is needed.

Needs the extras ``keras`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="digits of each rank in a step (default: 32)")
    parser.add_argument("--model", type=Path, help="a .keras file to write after each epoch")
    options = parser.parse_args()

    hvd.init()  # 1: afterwards hvd.rank() and hvd.size() are known
    keras.utils.set_random_seed(hvd.rank())
    images, labels = load()
    x, y = hvd.data.shard((images[:TRAINING], labels[:TRAINING]))  # 2: this rank's part, as large as the others'
    test_x, test_y = hvd.data.shard((images[TRAINING:], labels[TRAINING:]), uneven="keep")

    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.002)),  # 3: gradients are averages over all ranks
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # 4: all ranks start from rank 0's weights
        hvd.callbacks.MetricAverageCallback(),  # 5: what fit prints are averages over all ranks
    ]
    if options.model and hvd.rank() == 0:  # 6: rank 0 writes and prints
        callbacks.append(keras.callbacks.ModelCheckpoint(options.model))
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs, callbacks=callbacks, verbose=verbose)

    found = hvd.data.evaluate(model, test_x, test_y)  # 7: over the test digits of all ranks
    if hvd.rank() == 0:
        print(f"test accuracy {found['accuracy']:.2%}", flush=True)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 (1797, 8, 8, 1), from 0 to 1, and their labels, int64 (1797,)."""
    digits = load_digits()
    return (digits.images[..., None] / 16).astype("float32"), digits.target


if __name__ == "__main__":
    main()
