"""The callbacks in a real ``fit``, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks import RankError


def line(keras: Any, seed: int = 1) -> Any:
    """A model of one weight and one bias, compiled with momentum."""
    import horovod.keras as hvd

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.04, momentum=0.9)), loss="mse", metrics=["mae"])
    return model


def points(rank: int, samples: int = 8) -> tuple[Any, Any]:
    x = np.random.default_rng(rank).normal(size=(samples, 1)).astype(np.float32)
    return x, 2 * x + rank


def test_metrics_are_averages_and_all_stop_at_the_same_epoch(job: Any) -> None:
    """Validation data differ, so do the ranks' own losses; early stopping and the history see averages."""

    def check() -> Any:
        import keras

        import horovod.keras as hvd

        own: list[dict[str, float]] = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                own.append(dict(logs))

        callbacks = [
            Look(),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=0.05),
        ]
        rank = hvd.rank()
        history = line(keras).fit(
            *points(rank), batch_size=4, epochs=30, verbose=0, callbacks=callbacks, validation_data=points(rank + 7)
        )
        return history.history, own

    results = job(3, check)
    histories = [history for history, _ in results]
    assert histories[0] == histories[1] == histories[2]
    epochs = len(histories[0]["loss"])
    assert 2 < epochs < 30
    assert set(histories[0]) == {"loss", "mae", "val_loss", "val_mae"}
    for epoch in range(epochs):
        for name, values in histories[0].items():
            wanted = np.mean([own[epoch][name] for _, own in results])
            assert values[epoch] == pytest.approx(wanted, rel=1e-9)
    assert len({own[0]["loss"] for _, own in results}) == 3


def test_metrics_that_only_one_rank_has_are_an_error_that_names_them(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        validation = points(9) if hvd.rank() == 0 else None
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        line(keras).fit(*points(0), batch_size=4, verbose=0, callbacks=callbacks, validation_data=validation)

    with pytest.raises(RankError) as caught:
        job(2, check)
    for rank in (0, 1):
        text = str(caught.value.errors[rank])
        assert "rank 0:" in text and "the metrics are loss, mae, val_loss, val_mae" in text
        assert "rank 1:" in text and "the metrics are loss, mae\n" in text + "\n"


def rates_of(model: Any, callbacks: list[Any], epochs: int, samples: int = 8) -> tuple[list[float], Any]:
    """The learning rate in each batch, beginning with 0.04, and the history."""
    import keras

    rates: list[float] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(np.asarray(self.model.optimizer.learning_rate.numpy())))

    model.optimizer.learning_rate = 0.04
    history = model.fit(*points(0, samples), batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks, Look()])
    return rates, history.history


def test_learning_rates_follow_schedules_and_warmup(job: Any) -> None:
    def check() -> str:
        import contextlib
        import io

        import keras

        import horovod.keras as hvd

        size, model = hvd.size(), line(keras)
        schedule, warmup = hvd.callbacks.LearningRateScheduleCallback, hvd.callbacks.LearningRateWarmupCallback

        rates, history = rates_of(model, [schedule(0.5, lambda epoch: 0.1**epoch)], 3)
        np.testing.assert_allclose(rates, [0.5, 0.5, 0.05, 0.05, 0.005, 0.005], rtol=1e-5)
        np.testing.assert_allclose(history["lr"], [0.5, 0.05, 0.005], rtol=1e-5)

        rates, _ = rates_of(model, [schedule(0.5, 0.5, start_epoch=1, end_epoch=3)], 4)
        np.testing.assert_allclose(rates, [0.04, 0.04, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25], rtol=1e-5)

        rates, _ = rates_of(model, [schedule(multiplier=0.1, start_epoch=1)], 3)  # as before initial_lr was needed
        np.testing.assert_allclose(rates, [0.04, 0.04, 0.004, 0.004, 0.004, 0.004], rtol=1e-5)

        rates, _ = rates_of(model, [schedule(lambda epoch: 2 + epoch)], 2)
        np.testing.assert_allclose(rates, [0.08, 0.08, 0.12, 0.12], rtol=1e-5)

        rates, _ = rates_of(model, [schedule(multiplier=lambda epoch: 1 + epoch, staircase=False)], 2)
        np.testing.assert_allclose(rates, 0.04 * np.array([1, 1.5, 2, 2.5]), rtol=1e-5)

        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            rates, _ = rates_of(model, [warmup(warmup_epochs=2, verbose=1)], 3, samples=16)
        done = np.minimum((np.arange(12) + 1) / 4, 2)
        np.testing.assert_allclose(rates, 0.04 / size * (done * (size - 1) / 2 + 1), rtol=1e-5)
        return told.getvalue()

    told = job(3, check)
    assert "Epoch 2: finished gradual learning rate warmup to 0.04" in told[0] and told[1:] == ["", ""]


def test_momentum_is_corrected_when_the_learning_rate_changes_and_only_if_asked(job: Any) -> None:
    """The step after a change of the learning rate has its momentum multiplied by new / old (Goyal et al. 2017)."""

    def train(corrected: bool) -> Any:
        import keras

        import horovod.keras as hvd

        model = line(keras)
        before = [np.array(weight) for weight in model.get_weights()]
        x, y = points(0, 16)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.25, momentum_correction=corrected)
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[callback])

        w, b = (float(each.reshape(())) for each in before)
        velocity = np.zeros(2)
        old = 0.04
        for epoch in range(3):
            rate = 0.1 * 0.25**epoch
            for batch in range(2):
                part = slice(8 * batch, 8 * batch + 8)
                error = w * x[part, 0] + b - y[part, 0]
                gradient = np.array([2 * np.mean(error * x[part, 0]), 2 * np.mean(error)])
                momentum = 0.9 * rate / old if corrected else 0.9
                velocity = momentum * velocity - rate * gradient
                w, b = w + velocity[0], b + velocity[1]
                old = rate
        found = [float(each.reshape(())) for each in model.get_weights()]
        np.testing.assert_allclose(found, [w, b], rtol=1e-4)
        return found

    corrected, plain = job(2, train, True), job(2, train, False)
    assert corrected[0] == corrected[1] and plain[0] == plain[1]
    assert np.abs(np.array(corrected[0]) - plain[0]).max() > 1e-3


def test_broadcast_leaves_local_variables_alone(job: Any) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        model = line(keras, seed=hvd.rank())
        model.optimizer.learning_rate = 0.0
        kernel, bias = model.trainable_variables
        bias.assign([float(hvd.rank())])
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[bias])
        model.fit(*points(0), batch_size=4, verbose=0, callbacks=[callback])
        return float(kernel.numpy().reshape(())), float(bias.numpy()[0])

    results = job(3, check)
    assert len({kernel for kernel, _ in results}) == 1
    assert [bias for _, bias in results] == [0.0, 1.0, 2.0]


def test_a_model_that_one_rank_has_restored_is_broadcast_with_its_optimizer(job: Any, tmp_path: Any) -> None:
    """Rank 0 loads a checkpoint with the optimizer's state; the others begin anew and get all of it."""
    path = str(tmp_path / "model.keras")

    def check(path: str) -> Any:
        import keras

        import horovod.keras as hvd

        if hvd.rank() == 0:
            first = line(keras, seed=4)
            first.optimizer.build(first.trainable_variables)
            first.optimizer.momentums[0].assign([[0.5]])
            first.optimizer.iterations.assign(17)
            first.save(path)
            model = hvd.load_model(path)
        else:
            model = line(keras, seed=5)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*points(hvd.rank()), batch_size=4, verbose=0, callbacks=[callback])
        weights = [*model.get_weights(), *[variable.numpy() for variable in model.optimizer.variables]]
        return int(model.optimizer.iterations.numpy()), [np.asarray(each).tolist() for each in weights]

    results = job(2, check, path)
    assert results[0] == results[1] and results[0][0] == 19


def test_a_rank_that_resumes_has_the_learning_rates_of_all(job: Any) -> None:
    """It was saved in the middle of a schedule; all ranks go on with the whole one."""

    def check() -> list[float]:
        import keras

        import horovod.keras as hvd

        rates: list[float] = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                rates.append(float(np.asarray(self.model.optimizer.learning_rate.numpy())))

        model = line(keras)
        model.optimizer.learning_rate = 0.5 if hvd.rank() else 0.05
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.LearningRateScheduleCallback(multiplier=lambda epoch: 0.1**epoch),
            Look(),
        ]
        model.fit(*points(0, 8), batch_size=8, initial_epoch=1, epochs=3, verbose=0, callbacks=callbacks)
        return rates

    for rates in job(2, check):
        np.testing.assert_allclose(rates, [0.05, 0.005], rtol=1e-5)


def test_best_model_checkpoint_needs_a_path_and_writes_there(job: Any, tmp_path: Any) -> None:
    def check(path: str) -> None:
        import keras

        import horovod.keras as hvd

        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        with np.testing.assert_raises_regex(ValueError, "filepath"):
            line(keras).fit(*points(0), verbose=0, callbacks=[best])
        best.filepath = path
        line(keras).fit(*points(0), epochs=2, verbose=0, callbacks=[best])
        assert Path(path).exists()

    job(1, check, str(tmp_path / "best.keras"))


def test_bad_arguments_of_callbacks_are_refused(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        calls = hvd.callbacks
        with np.testing.assert_raises_regex(ValueError, "initial_lr"):
            calls.LearningRateScheduleCallback(None, 1.0)
        with np.testing.assert_raises_regex(TypeError, "multiplier"):
            calls.LearningRateScheduleCallback(0.1)
        with np.testing.assert_raises_regex(ValueError, "local_variables"):
            calls.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])
        with np.testing.assert_raises_regex(ValueError, "steps_per_epoch"):
            callback = calls.LearningRateWarmupCallback(0.1)
            callback.set_params({"steps": None, "epochs": 1})
            callback.set_model(line(keras))
            callback.on_train_begin()
        optimizer = keras.optimizers.SGD(0.1)
        for arguments, pattern in (
            ({"op": 4}, "Average and Sum"),
            ({"gradient_predivide_factor": 2.0, "op": 1}, "gradient_predivide_factor"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
            ({"groups": 0}, "groups"),
            ({"groups": "all"}, "groups"),
        ):
            with np.testing.assert_raises_regex(ValueError, pattern):
                hvd.DistributedOptimizer(optimizer, **arguments)
        with np.testing.assert_raises_regex(ValueError, "already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer))
        with np.testing.assert_raises_regex(ValueError, "local layers"):
            hvd.PartialDistributedOptimizer(optimizer, local_layers=["dense"])
        with np.testing.assert_raises_regex(RuntimeError, "eager"):
            hvd.broadcast_global_variables(0)

    job(1, check)
