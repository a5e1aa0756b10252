"""Elastic training in ``fit``, on every backend of Keras: states, callbacks, and a change of size in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod.common.elastic import HostUpdateResult
from keras_ranks import POOL, env_of
from ranks import RankPool
from scripted_launcher import ScriptedLauncher

SAMPLES = 36


def line(keras: Any, seed: int = 1) -> Any:
    import horovod.keras as hvd

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1), keras.layers.Dropout(0.0, seed=seed)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9)), loss="mse")
    return model


def weights_of(model: Any) -> list[float]:
    return [float(each) for array in model.get_weights() for each in np.ravel(array)]


def all_data() -> tuple[Any, Any]:
    x = np.linspace(-1, 1, SAMPLES, dtype=np.float32)[:, None]
    return x, 2 * x + 1


@pytest.mark.parametrize("how", ["lost", "added"])
def test_fit_goes_on_with_other_ranks(ranks: Callable[..., RankPool], backend: str, how: str) -> None:
    """A round ends in the middle of the second epoch: what follows is what one process does that was never interrupted."""

    def work(how: str) -> Any:
        import keras

        import horovod.keras as hvd

        rounds = {"lost": [[0, 1, 2], [1, 2]], "added": [[1, 2], [2, 1]]}[how]
        x, y = all_data()
        with ScriptedLauncher(rounds, hvd.shutdown) as launcher:
            hvd.init()
            model = line(keras, seed=launcher.process)
            state = hvd.elastic.KerasState(model, batch=0, epoch=0)
            began = []

            class Disturb(keras.callbacks.Callback):
                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    if launcher.number == 0 and state.epoch == 1 and batch == 1:
                        if how == "added":
                            launcher.news = HostUpdateResult.added
                        elif launcher.process == 0:
                            raise SystemExit(0)

            callbacks = [
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Disturb(),
                hvd.elastic.CommitStateCallback(state),
            ]

            @hvd.elastic.run
            def train(state: Any) -> None:
                began.append((hvd.size(), state.epoch, state.batch))
                part = slice(hvd.rank(), None, hvd.size())
                size = 12 // hvd.size()  # the same global batch whatever the number of ranks
                done = state.batch + 1 if state.batch else 0  # 0 is also what an epoch begins with
                if done:
                    rest = (x[12 * done :][part], y[12 * done :][part])
                    model.fit(*rest, batch_size=size, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
                model.fit(
                    x[part], y[part], batch_size=size, epochs=4, initial_epoch=state.epoch, shuffle=False, verbose=0,
                    callbacks=callbacks,
                )  # fmt: skip

            try:
                train(state)
            except SystemExit:
                return began, None
            return began, weights_of(model)

    pool = ranks(POOL, env_of(backend), "keras")

    def alone(seed: int) -> list[float]:
        import keras

        import horovod.keras as hvd

        with ScriptedLauncher([[0]], hvd.shutdown):
            hvd.init()
            model = line(keras, seed)
            model.fit(*all_data(), batch_size=12, epochs=4, shuffle=False, verbose=0)
            return weights_of(model)

    call = pool.start(work, how, ranks=[0, 1, 2] if how == "lost" else [1, 2])
    results = call.results(timeout=180)[-2:]
    (wanted,) = pool.run(alone, 0 if how == "lost" else 1, ranks=[0])
    for began, weights in results:
        size = {"lost": 3, "added": 2}[how]
        assert began[0] == (size, 0, 0) and began[1][:2] == (2, 1)
        assert weights == pytest.approx(wanted, abs=1e-5)


def test_a_restored_model_and_optimizer_are_those_of_the_commit(job: Any) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        model = line(keras, seed=hvd.rank())
        state = hvd.elastic.KerasState(model, epoch=hvd.rank() + 4)
        state.sync()
        begin = weights_of(model)
        model.fit(*all_data(), epochs=2, verbose=0)
        state.epoch = 6
        state.commit()
        committed = weights_of(model), [np.array(each.numpy()).tolist() for each in model.optimizer.variables]
        model.fit(*all_data(), epochs=2, verbose=0)
        state.epoch = 8
        assert weights_of(model) != committed[0]
        state.restore()
        assert (weights_of(model), [np.array(each.numpy()).tolist() for each in model.optimizer.variables]) == committed
        assert state.epoch == 6
        return begin

    first, second = job(2, check)
    assert first == second


def test_an_unbuilt_model_and_wrong_numbers_are_refused(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        with pytest.raises(ValueError, match=r"Model must be built first. Run `model.build\(input_shape\)`"):
            hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
        with pytest.raises(ValueError, match="batches_per_commit=0"):
            hvd.elastic.CommitStateCallback(hvd.elastic.KerasState(line(keras)), batches_per_commit=0)

    job(1, check)


def test_callbacks_count_batches_and_epochs_over_several_fits(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        model = line(keras)
        state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        commits: list[tuple[int, int]] = []
        state.commit = lambda: commits.append((state.epoch, state.batch))
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        ]
        x, y = all_data()
        model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=callbacks)  # three batches
        assert commits == [(0, 1), (1, 0), (1, 1), (2, 0)]
        commits.clear()
        state.batch = 1  # an epoch that is under way
        model.fit(x[12:], y[12:], batch_size=12, initial_epoch=2, epochs=3, verbose=0, callbacks=callbacks)
        assert commits == [(2, 2), (3, 0)]
        model.fit(x, y, batch_size=12, epochs=1, verbose=0, callbacks=callbacks)
        assert (state.epoch, state.batch) == (4, 0)

    job(1, check)
