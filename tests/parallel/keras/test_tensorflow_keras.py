"""``horovod.tensorflow.keras`` with both versions of ``tf.keras``: Keras 3, and Keras 2 with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs import Job, make_job
from keras_ranks import batches, tensorflow_pool
from part import some

BINDING = "horovod.tensorflow.keras"


@pytest.fixture(scope="module", params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def job(ranks: Any, version: int) -> Job:
    return make_job(lambda size: tensorflow_pool(ranks, version), BINDING)


def network(tf: Any, seed: int = 7) -> Any:
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def data(size: int, rank: int | None) -> tuple[Any, Any]:
    return batches(size, rank, 4, 4, (6, 3))


def fit(model: Any, optimizer: Any, size: int, rank: int | None, callbacks: Any = (), **compile: Any) -> Any:
    model.compile(optimizer, loss="mse", **compile)
    x, y = data(size, rank)
    batch = 4 * (size if rank is None else 1)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def assert_close(found: Any, wanted: Any, **tolerance: float) -> None:
    for one, two in zip(found.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


# Keras 3 is here as in test_fit.py; Keras 2 has optimizers of its own.
@pytest.mark.parametrize("size", some([2, 3], [3]))
def test_fit_trains_as_one_process_with_all_data_does(job: Job, version: int, size: int) -> None:
    def check(version: int) -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        assert hasattr(tf.keras, "ops") == (version == 3)
        rank, size = hvd.rank(), hvd.size()
        of = tf.keras.optimizers
        makers = [lambda: of.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.2)]
        if version == 2:
            makers.append(lambda: of.legacy.SGD(0.05, momentum=0.9))
        if size == 2:
            makers.append(
                lambda: of.Adam(of.schedules.ExponentialDecay(0.01, 2, 0.9), epsilon=1e-4, global_clipnorm=0.5)
            )
        if size == 2 and version == 2:
            makers += [lambda: of.SGD(0.1), lambda: of.legacy.Adam(0.01, epsilon=1e-4)]
        weights = []
        for make in makers:
            optimizer = hvd.DistributedOptimizer(make())
            kind = type(make())
            assert type(optimizer).__module__ == "horovod._keras" and type(optimizer).__name__ == kind.__name__
            assert isinstance(optimizer, kind)
            model = fit(network(tf), optimizer, size, rank)
            if rank == 0:  # the other ranks' weights are compared with these
                assert_close(model, fit(network(tf), make(), size, None))
            weights.append([weight.tolist() for weight in model.get_weights()])
        return weights

    results = job(size, check, version, timeout=200)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("averaged", [True, False])
def test_several_passes_for_one_step_train_as_one_process(job: Job, averaged: bool) -> None:
    """Two batches' gradients make one step: as one process with twice the batch."""

    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        size = hvd.size()
        rate = 0.1 if averaged else 0.05
        optimizer = hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=averaged
        )
        model = fit(network(tf), optimizer, size, hvd.rank())
        if hvd.rank() == 0:
            alone = network(tf)
            alone.compile(tf.keras.optimizers.SGD(0.1), loss="mse")
            x, y = data(size, None)
            alone.fit(x, y, batch_size=8 * size, epochs=2, shuffle=False, verbose=0)
            assert_close(model, alone)
        return [weight.tolist() for weight in model.get_weights()]

    results = job(2, check)
    assert results[0] == results[1]


def test_callbacks_schedule_the_learning_rate_and_all_ranks_train_alike(job: Job) -> None:
    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        calls = hvd.callbacks
        rank, size = hvd.rank(), hvd.size()
        callbacks = [
            calls.BroadcastGlobalVariablesCallback(0),
            calls.MetricAverageCallback(),
            calls.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=1),
            calls.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5, start_epoch=1),
        ]
        model = network(tf, seed=rank)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * (rank + 1), momentum=0.5))
        model.compile(optimizer, loss="mse", metrics=["mae"])
        x, y = data(size, rank)
        history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        np.testing.assert_allclose(history["lr"], [0.1, 0.1, 0.05], rtol=1e-5)
        return history, [weight.tolist() for weight in model.get_weights()]

    results = job(3, check)
    assert results[0] == results[1] == results[2]


def test_momentum_of_legacy_optimizers_is_corrected(job: Job, version: int) -> None:
    if version == 3:
        pytest.skip("Keras 3 has no legacy optimizers")

    def check() -> None:
        import tensorflow as tf

        from horovod._keras import learning_rate

        for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
            optimizer = kind(0.1, momentum=0.5)
            variable = tf.Variable([0.0])
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
            learning_rate.carry_momentum(optimizer, 3.0)
            learning_rate.put(optimizer, 0.0)
            assert learning_rate.get(optimizer) == 0.0
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
            np.testing.assert_allclose(variable.numpy(), [-0.1 - 0.5 * 0.3], rtol=1e-6)

    job(1, check)


@pytest.mark.parametrize("ending", [".keras", ".h5", ""])
def test_a_loaded_model_trains_on_where_it_was_saved(job: Job, version: int, ending: str, tmp_path: Any) -> None:
    if ending not in {2: some([".keras", ".h5", ""], [".h5", ""]), 3: some([".keras", ".h5"], [".keras"])}[version]:
        pytest.skip("Keras 3 does not write this format, or it is one for make test-all")

    def check(folder: str) -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        path = f"{folder}/{rank}{ending}"

        def begun() -> Any:
            model = network(tf)
            optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.05))
            model.compile(optimizer, loss=tf.keras.losses.MeanSquaredError())
            return more(model)

        def more(model: Any) -> Any:
            x, y = data(size, rank)
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            return model

        through = more(begun())
        begun().save(path)
        tf.keras.models.load_model(path)  # plain Keras reads it
        resumed = hvd.load_model(path)
        assert type(resumed.optimizer).__module__ == "horovod._keras"
        if ending:  # Keras 2 leaves the optimizer's state in a SavedModel where it is
            assert_close(more(resumed), through)
        return [weight.tolist() for weight in resumed.get_weights()]

    results = job(2, check, str(tmp_path))
    assert results[0] == results[1]


def test_steps_that_are_not_finite_lower_the_loss_scale_on_all_ranks(job: Job) -> None:
    """A model of float16: a step that is not finite on one rank is skipped by all."""

    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        tf.keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            model = network(tf)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05)), loss="mse")
        assert "LossScaleOptimizer" in type(model.optimizer).__name__
        x, y = data(hvd.size(), hvd.rank())
        moved = []
        for step in range(3):
            before = model.get_weights()
            broken = np.inf if step == 1 and hvd.rank() == 1 else 1
            model.train_on_batch(x[4 * step : 4 * step + 4] * broken, y[4 * step : 4 * step + 4])
            moved.append(any((one != two).any() for one, two in zip(before, model.get_weights(), strict=True)))
        assert moved == [True, False, True], moved
        return [weight.tolist() for weight in model.get_weights()]

    results = job(2, check)
    assert results[0] == results[1]


def test_local_variables_keep_their_ranks_gradient_and_values_are_reduced_and_gathered(job: Job) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        shared, own = tf.Variable([0.0, 0.0]), tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16, groups=[[shared]]
        )
        optimizer.register_local_var(own)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) * (rank + 1) + tf.reduce_sum(own) * (rank + 1)
        if hasattr(optimizer, "minimize"):
            optimizer.minimize(loss, [shared, own], tape=tape)
        else:
            optimizer.apply_gradients(zip(tape.gradient(loss, [shared, own]), [shared, own], strict=True))
        np.testing.assert_allclose(shared.numpy(), -(size + 1) / 2)
        np.testing.assert_allclose(own.numpy(), -(rank + 1) / size)
        assert hvd.allreduce(rank, op=hvd.Sum).numpy() == 3
        assert hvd.allgather([rank]).numpy().tolist() == [0, 1, 2]
        assert hvd.broadcast([rank], 2).numpy().tolist() == [2]
        assert hvd.reducescatter(np.ones((3, 2), np.float32), op=hvd.Sum).numpy().tolist() == [[3.0, 3.0]]
        with np.testing.assert_raises_regex(RuntimeError, "eager"):
            hvd.broadcast_global_variables(0)

    job(3, check)


def test_a_model_with_jit_compile_trains_as_one_process_does(job: Job) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
        model = fit(network(tf), optimizer, hvd.size(), hvd.rank(), jit_compile=True)
        assert_close(model, fit(network(tf), tf.keras.optimizers.SGD(0.1), hvd.size(), None))

    job(2, check)


def test_sync_batch_normalization_in_fit_trains_as_one_process(job: Job) -> None:
    """SyncBatchNormalization of images in ``fit``: the statistics of all ranks' batches, with either Keras.

    Keras's numbers of layers and models differ by rank.
    """

    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow as tensorflow_hvd
        import horovod.tensorflow.keras as hvd

        def normalising(layer: Any, optimizer: Any) -> Any:
            layers = tf.keras.layers
            model = tf.keras.Sequential([layers.Input((2, 2, 3)), layer, layers.Flatten(), layers.Dense(1)])
            model.set_weights([np.full_like(weight, 0.1) for weight in model.get_weights()])
            model.compile(optimizer, loss="mse")
            return model

        x = np.random.default_rng(5).normal(3.0, 2.0, (hvd.size() * 4, 2, 2, 3)).astype(np.float32)
        y = x[:, 0, 0, :1]
        unfused = {"fused": False} if hasattr(tf.keras.layers.BatchNormalization, "_fused_can_be_used") else {}
        whole = normalising(tf.keras.layers.BatchNormalization(**unfused), tf.keras.optimizers.SGD(0.1))
        whole.fit(x, y, batch_size=len(x), shuffle=False, verbose=0, epochs=2)
        mine = slice(hvd.rank(), None, hvd.size())
        if hvd.rank() == 0:
            normalising(tensorflow_hvd.SyncBatchNormalization(), "sgd")
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
        parts = normalising(tensorflow_hvd.SyncBatchNormalization(), optimizer)
        parts.fit(x[mine], y[mine], batch_size=4, shuffle=False, verbose=0, epochs=2)
        assert_close(parts, whole, rtol=1e-3, atol=1e-4)
        return [weight.tolist() for weight in parts.get_weights()]

    results = job(2, check)
    assert results[0] == results[1]


def test_best_model_checkpoint_saves_weights_only_on_request(job: Job, tmp_path: Any) -> None:
    def check(path: str) -> None:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        best = hvd.callbacks.BestModelCheckpoint("loss", 0, True)  # as it is called by position
        best.filepath = path
        model = fit(network(tf), hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), 1, 0, [best])
        again = network(tf, seed=1)
        again.load_weights(path)
        assert_close(again, model)

    job(1, check, str(tmp_path / "best.weights.h5"))
