"""Mixed precision: Keras scales losses of float16 models, and all ranks must agree on which steps to skip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_ranks import batches


def network(keras: Any, policy: str) -> Any:
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        return keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
        )
    finally:
        keras.config.set_dtype_policy("float32")


def data(size: int, rank: int | None) -> tuple[Any, Any]:
    return batches(size, rank, 6, 4, (4, 1), seed=0)


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(job: Any, inside: bool) -> None:
    """Whether Keras puts its loss scaling around the distributed optimizer, or the user wraps both."""

    def check() -> Any:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        model = network(keras, "mixed_float16")
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        if inside:
            scaling = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=2)
            optimizer = hvd.DistributedOptimizer(scaling)
        else:
            scaled = hvd.DistributedOptimizer(optimizer)
            optimizer = keras.optimizers.LossScaleOptimizer(scaled, initial_scale=2.0**10, dynamic_growth_steps=2)
        model.compile(optimizer, loss="mse")
        x, y = data(size, rank)
        scales = []
        for step in range(6):
            part = slice(4 * step, 4 * step + 4)
            broken = step == 2 and rank == 1
            before = model.get_weights()
            model.train_on_batch(x[part] * (np.inf if broken else 1), y[part])
            same = all(np.array_equal(one, two) for one, two in zip(before, model.get_weights(), strict=True))
            assert same == (step == 2), step
            scales.append(float(model.optimizer.dynamic_scale.numpy()))
        return scales, [np.asarray(weight).tolist() for weight in model.get_weights()]

    results = job(3, check)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == [2**10, 2**11, 2**10, 2**10, 2**11, 2**11]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_in_sixteen_bits_trains_as_one_process_does(job: Any, policy: str) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        model = network(keras, policy)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
        assert (type(model.optimizer).__name__ == "LossScaleOptimizer") == (policy == "mixed_float16")
        x, y = data(size, rank)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        alone = network(keras, policy)
        alone.compile(keras.optimizers.SGD(0.05), loss="mse")
        x, y = data(size, None)
        alone.fit(x, y, batch_size=4 * size, epochs=2, shuffle=False, verbose=0)
        for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=3e-3 if policy == "mixed_float16" else 2e-2)
        assert np.abs(model.get_weights()[0] - network(keras, policy).get_weights()[0]).max() > 0.02
        return [np.asarray(weight).tolist() for weight in model.get_weights()]

    results = job(2, check)
    assert results[0] == results[1]
