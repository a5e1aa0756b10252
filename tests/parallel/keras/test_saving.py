"""Files: what a distributed optimizer leaves in them, who can read them, and how training goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def model_of(keras: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    return model


def train(model: Any, rank: int, epochs: int = 1) -> Any:
    random = np.random.default_rng(rank)
    x, y = random.normal(size=(8, 4)).astype(np.float32), random.normal(size=(8, 1)).astype(np.float32)
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def state(model: Any) -> list[Any]:
    return [np.asarray(variable.numpy()).tolist() for variable in [*model.weights, *model.optimizer.variables]]


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_loaded_model_trains_on_where_it_was_saved(job: Any, tmp_path: Any, ending: str) -> None:
    """Saved after two epochs, loaded, two more: as four epochs without a stop; and plain Keras reads the file too."""

    def check(folder: str) -> Any:
        import keras

        import horovod.keras as hvd

        rank = hvd.rank()
        through = train(model_of(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))), rank, 4)
        path = f"{folder}/{rank}.{ending}"
        train(model_of(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))), rank, 2).save(path)
        resumed = hvd.load_model(path)
        kind = type(resumed.optimizer)
        assert (kind.__name__, kind.__module__) == ("Adam", "horovod._keras")
        assert isinstance(resumed.optimizer, keras.optimizers.Adam)
        train(resumed, rank, 2)
        for one, two in zip(state(resumed), state(through), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)

        plain = keras.models.load_model(path)
        assert type(plain.optimizer).__module__.startswith("keras.")
        if ending == "h5":
            return state(resumed)  # of which Keras itself does not restore the optimizer
        wrapped = hvd.DistributedOptimizer(plain.optimizer)
        assert [np.asarray(v.numpy()).tolist() for v in wrapped.variables] == [
            np.asarray(v.numpy()).tolist() for v in plain.optimizer.variables
        ]
        import json
        import zipfile

        text = zipfile.ZipFile(path).read("config.json").decode()
        assert "horovod" not in text
        saved = json.loads(text)["compile_config"]["optimizer"]
        assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "Adam")
        return state(resumed)

    results = job(2, check, str(tmp_path))
    assert results[0] == results[1]


def test_weights_files_restore_the_optimizer_and_an_export_predicts_alike(
    job: Any, tmp_path: Any, backend: str
) -> None:
    def check(folder: str) -> None:
        import keras

        import horovod.keras as hvd

        model = train(model_of(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))), 0, 1)
        path = f"{folder}/{hvd.rank()}.weights.h5"
        model.save_weights(path)
        other = model_of(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path)
        assert state(other) == state(model)
        if backend == "tensorflow":
            import tensorflow as tf

            model.export(f"{folder}/{hvd.rank()}")
            x = np.ones((2, 4), np.float32)
            exported = tf.saved_model.load(f"{folder}/{hvd.rank()}")
            served = exported.serve(x)
            np.testing.assert_allclose(served, model.predict(x, verbose=0), rtol=1e-6)

    job(2, check, str(tmp_path))


def test_optimizers_of_users_keep_their_settings_and_are_loaded_as_their_class(job: Any, tmp_path: Any) -> None:
    """A registered class of the user's with an exclusion from weight decay and a schedule nobody registered."""

    def check(folder: str) -> None:
        import keras

        import horovod.keras as hvd

        class Halving(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> Any:
                return 0.1 / (1 + keras.ops.cast(step, "float32"))

        plain = keras.optimizers.AdamW(Halving(), weight_decay=0.5)
        plain.exclude_from_weight_decay(var_names=["bias"])
        wrapped = hvd.DistributedOptimizer(plain, name="mine")
        assert type(wrapped).__name__ == "AdamW" and wrapped._name == "mine" and wrapped.name == plain.name
        wrapped.build([variable := keras.Variable(np.ones(2, np.float32), name="bias")])
        assert not wrapped._use_weight_decay(variable)
        assert float(wrapped.learning_rate) == pytest.approx(0.1)

        @keras.saving.register_keras_serializable("mine")
        class Careful(keras.optimizers.SGD):
            pass

        path = f"{folder}/{hvd.rank()}.keras"
        train(model_of(keras, hvd.DistributedOptimizer(Careful(0.05))), 0).save(path)
        assert isinstance(keras.models.load_model(path).optimizer, Careful)
        loaded = hvd.load_model(path, custom_optimizers=[Careful])
        assert isinstance(loaded.optimizer, Careful) and type(loaded.optimizer).__module__ == "horovod._keras"
        assert loaded.optimizer.variables() == loaded.optimizer.variables

    job(2, check, str(tmp_path))
