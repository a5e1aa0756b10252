"""``hvd.Compression.int8`` in Keras's optimizers, between pretended hosts, on each back end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs import Job

LENGTH = 5000


def values(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(1, LENGTH)).astype(np.float32)


def test_an_allreduce_is_compressed(job: Job) -> None:
    def one() -> Any:
        import horovod.keras as hvd

        return np.array(hvd.allreduce(values(hvd.rank()), op=hvd.Sum, compression=hvd.Compression.int8))

    first, second = job(2, one, hosts="ab")
    np.testing.assert_array_equal(first, second)
    assert 0 < np.abs(first - values(0) - values(1)).max() < 0.1


@pytest.mark.parametrize("by_setting", [False, True])
def test_fit_trains_with_compressed_gradients(job: Job, by_setting: bool) -> None:
    steps, rate = 20, 0.01
    exact = -rate * steps * (values(0).astype(np.float64) + values(1))[0] / 2

    def one() -> Any:
        import keras

        import horovod.keras as hvd

        model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.build((None, LENGTH))
        chosen = hvd.Compression.none if by_setting else hvd.Compression.int8
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), compression=chosen)
        model.compile(optimizer, loss=lambda _, output: keras.ops.mean(output))
        own = values(hvd.rank())
        model.fit(own, np.zeros((1, 1), np.float32), epochs=steps, batch_size=1, verbose=0)
        return np.array(model.get_weights()[0])[:, 0]

    first, second = job(2, one, hosts="ab", env={"HOROVOD_COMPRESSION": "int8"} if by_setting else {})
    np.testing.assert_array_equal(first, second)
    # Without feedback, the error of one step, up to a hundredth of the largest gradient, would come twenty times.
    assert 0 < np.abs(first - exact).max() < 3 * rate * np.abs(values(0)).max() / 100
