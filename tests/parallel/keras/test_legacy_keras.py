"""``horovod.keras`` where TensorFlow's Keras is Keras 2 (``TF_USE_LEGACY_KERAS=1``): scripts import either binding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import Job, make_job
from keras_ranks import tensorflow_pool


@pytest.fixture
def job(ranks: Any) -> Job:
    return make_job(lambda size: tensorflow_pool(ranks, 2), "horovod.keras")


def test_optimizers_of_keras_2_train_as_in_one_process(job: Job, tmp_path: Path) -> None:
    def check(folder: Path) -> Any:
        import numpy as np
        import tensorflow as tf

        import horovod.keras as hvd
        import horovod.tensorflow.keras as other

        assert not hasattr(tf.keras, "ops")
        rank, size = hvd.rank(), hvd.size()
        random = np.random.default_rng(5)
        x, y = (random.normal(size=(8, width)).astype(np.float32) for width in (3, 2))

        def fitted(optimizer: Any, share: slice, callbacks: Any = ()) -> Any:
            tf.keras.utils.set_random_seed(7)
            model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
            model.compile(optimizer, "mse")
            model.fit(x[share], y[share], batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
            return model

        mine, of = slice(rank, None, size), tf.keras.optimizers
        for make in (lambda: of.SGD(0.1, momentum=0.9), lambda: of.legacy.Adam(0.01, epsilon=1e-3)):
            wanted = fitted(make(), slice(None)).get_weights()
            for binding in (hvd, other):
                callbacks = [
                    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                    hvd.callbacks.MetricAverageCallback(),
                    hvd.callbacks.LearningRateScheduleCallback(multiplier=lambda epoch: 1.0),
                ]
                callbacks.append(hvd.callbacks.BestModelCheckpoint(monitor="loss"))
                callbacks[-1].filepath = str(folder / f"best.{rank}.keras")
                distributed = binding.DistributedOptimizer(make())
                assert type(distributed).__name__ == type(make()).__name__
                model = fitted(distributed, mine, callbacks)
                for one, two in zip(model.get_weights(), wanted, strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="DistributedOptimizer already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(of.SGD()))
        for ending in ("keras", "h5"):
            path = folder / f"{rank}.{ending}"
            model.save(path)
            loaded = hvd.load_model(path)
            assert type(loaded.optimizer).__module__ == "horovod._keras"
            np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
        layer = tf.keras.layers.Dense(1, use_bias=False)
        partial = hvd.PartialDistributedOptimizer(of.SGD(1.0), local_layers=layer, scale_local_gradients=False)
        weight = tf.Variable([[1.0]])
        layer.build((None, 1))
        layer.set_weights([np.ones((1, 1), np.float32)])
        partial.minimize(lambda: (rank + 1.0) * tf.reduce_sum(weight + layer.kernel), [weight, layer.kernel])
        return weight.numpy().item(), layer.kernel.numpy().item()

    assert job(2, check, tmp_path) == [(-0.5, 0.0), (-0.5, -1.0)]


def test_optimizers_of_keras_3_work_beside_keras_2(job: Job) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        weight = keras.Variable([1.0])
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([keras.ops.ones([1]) * (hvd.rank() + 1)], [weight])
        assert weight.numpy() == [-0.5]

    job(2, check)


def test_elastic_states_of_keras_2_begin_alike_and_restore_the_commit(job: Job) -> None:
    """Whichever optimizer: ranks begin alike, and a restored model is that of the commit."""

    def check() -> Any:
        import numpy as np
        import tensorflow as tf

        import horovod.keras as hvd
        import horovod.tensorflow.keras as other

        x = np.ones((8, 3), np.float32)
        found = []
        for binding in (hvd, other):
            for make in (tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam):
                tf.keras.utils.set_random_seed(hvd.rank())
                model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
                model.compile(binding.DistributedOptimizer(make(0.1)), "mse")
                state = binding.elastic.KerasState(model, batch=0, epoch=0)
                callbacks = [
                    binding.elastic.UpdateBatchStateCallback(state),
                    binding.elastic.UpdateEpochStateCallback(state),
                    binding.elastic.CommitStateCallback(state),
                ]

                @binding.elastic.run
                def train(state: Any, model: Any = model, callbacks: Any = callbacks) -> None:
                    model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

                train(state)
                assert state.epoch == 2
                weights = [each.tolist() for each in model.get_weights()]
                model.fit(x, x[:, :2], batch_size=4, epochs=1, verbose=0)
                assert [each.tolist() for each in model.get_weights()] != weights
                state.restore()
                assert [each.tolist() for each in model.get_weights()] == weights
                found.append(weights)
        return found

    first, second = job(2, check)
    assert first == second


def test_models_with_synchronised_batch_normalisation_are_saved_in_folders(job: Job, tmp_path: Path) -> None:
    """``model.save(folder)`` of Keras 2 writes a SavedModel, whose function for training contains collectives."""

    def check(folder: str) -> None:
        import numpy as np
        import tensorflow as tf

        import horovod.tensorflow as hvd

        x = np.arange(8, dtype=np.float32).reshape(4, 2) * (1 + hvd.rank())
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(2,)), hvd.SyncBatchNormalization()])
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), "mse")
        model.fit(x, x, epochs=1, verbose=0)
        model.save(f"{folder}/{hvd.rank()}")
        custom = {"SyncBatchNormalization": hvd.SyncBatchNormalization}
        loaded = [
            tf.keras.models.load_model(f"{folder}/{hvd.rank()}", custom_objects=custom, compile=False),
            tf.saved_model.load(f"{folder}/{hvd.rank()}"),
        ]
        for training in (False, True):
            expected = model(x, training=training).numpy()
            for each in loaded:
                np.testing.assert_allclose(each(x, training=training), expected, rtol=1e-5)

        class Trainer(tf.Module):  # type: ignore[misc]  # untyped base
            def __init__(self) -> None:
                self.weight = tf.Variable([1.0, 2.0])
                self.optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)

            @tf.function(autograph=False, input_signature=[])
            def train(self) -> Any:
                self.optimizer.minimize(lambda: tf.reduce_sum(self.weight), [self.weight])
                return self.weight.read_value()

        trainer = Trainer()
        trainer.train()
        with pytest.raises(AssertionError, match=r"(?s)untracked.*aggregation_variables_DistributedSGD"):
            tf.saved_model.save(trainer, f"{folder}/trainer{hvd.rank()}")  # its sums belong to no object

    job(2, check, str(tmp_path))


def test_what_a_script_puts_in_place_of_the_reduction_is_used(job: Job) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd
        from horovod import _keras

        for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
            for passes in (1, 2):
                optimizer = _keras.create_distributed_optimizer(
                    keras=tf.keras, optimizer=kind(1.0), op=hvd.Sum, backward_passes_per_step=passes
                )
                variable = tf.Variable(tf.zeros(2))
                gradient = tf.fill([2], hvd.rank() + 1.0)
                assert optimizer._allreduce_grads([gradient], [variable], use_generic_names=True)[0][0] == 3.0
                for _ in range(passes):
                    optimizer.minimize(lambda v=variable: tf.reduce_sum(v) * (hvd.rank() + 1.0), [variable])
                assert variable.numpy().tolist() == [-3.0 * passes] * 2
                calls = []

                def mine(grads: Any, vars: Any, calls: Any = calls) -> Any:
                    calls.append(len(vars))
                    return [grad * 100.0 for grad in grads]

                optimizer._allreduce = mine
                for _ in range(passes):
                    optimizer.minimize(lambda v=variable: tf.reduce_sum(v), [variable])
                assert calls and variable.numpy().tolist() == [-103.0 * passes] * 2

    job(2, check)


def test_a_script_registers_local_variables_inside_its_reduction(job: Job) -> None:
    """Each rank has embedding tables of its own, of other numbers and shapes, which become known in the first reduction."""

    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        rank, found = hvd.rank(), []
        for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
            for passes, traced in ((1, False), (1, True), (2, False)):
                optimizer = hvd.DistributedOptimizer(kind(1.0), backward_passes_per_step=passes)
                tables = [tf.Variable(tf.zeros([3 + rank, 2])) for _ in range(1 + rank)]
                shared, late = tf.Variable([0.0]), tf.Variable([0.0, 0.0])
                reduce = optimizer._allreduce

                def registered(grads: Any, vars: Any, optimizer: Any = optimizer, reduce: Any = reduce) -> Any:
                    for variable in vars:
                        if variable.shape.rank == 2:
                            optimizer.register_local_var(variable)
                    return reduce(grads, vars)

                optimizer._allreduce = registered
                variables = [*tables, shared, late]

                def step(optimizer: Any = optimizer, variables: Any = variables) -> None:
                    with tf.GradientTape() as tape:
                        loss = tf.add_n([tf.reduce_sum(each) for each in variables]) * (hvd.rank() + 1.0)
                    optimizer.minimize(loss, variables, tape=tape)

                optimizer.build(variables) if hasattr(optimizer, "build") else optimizer._create_all_weights(variables)
                step = tf.function(step) if traced else step
                for _ in range(2 * passes):
                    step()
                assert all((table.numpy() == -(rank + 1.0) * passes).all() for table in tables), (kind, passes, tables)
                found.append([shared.numpy().tolist(), late.numpy().tolist()])
        return found

    results = job(2, check)
    for shared, late in results[0][:2]:
        assert shared + late == [-3.0] * 3
    assert results[0] == results[1]


def test_callbacks_of_other_projects_derive_from_those_that_take_the_back_end(job: Job) -> None:
    def check() -> None:
        import numpy as np
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd
        from horovod._keras import callbacks as impl

        class Broadcast(impl.BroadcastGlobalVariablesCallbackImpl, tf.keras.callbacks.Callback):  # type: ignore[misc]
            def __init__(self, root_rank: int, device: str = "") -> None:
                super().__init__(tf.keras.backend, root_rank, device)

        class Average(impl.MetricAverageCallbackImpl, tf.keras.callbacks.Callback):  # type: ignore[misc]
            def __init__(self, device: str = "") -> None:
                super().__init__(tf.keras.backend, device)

        class Schedule(impl.LearningRateScheduleCallbackImpl, tf.keras.callbacks.Callback):  # type: ignore[misc]
            def __init__(self, initial_lr: float, multiplier: Any) -> None:
                super().__init__(tf.keras.backend, initial_lr, multiplier)

        class Warmup(impl.LearningRateWarmupCallbackImpl, tf.keras.callbacks.Callback):  # type: ignore[misc]
            def __init__(self, initial_lr: float, warmup_epochs: int = 5) -> None:
                super().__init__(tf.keras.backend, initial_lr, warmup_epochs)

        tf.keras.utils.set_random_seed(hvd.rank())
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
        x = np.full((4, 2), hvd.rank() + 1.0, np.float32)
        for callback, rate in ((Schedule(0.1, lambda epoch: 0.5), 0.05), (Warmup(0.1, 2), 0.1)):
            logs = model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[Broadcast(0), Average(), callback]).history
            np.testing.assert_allclose(hvd.allreduce(logs["loss"][-1], op=hvd.Average), logs["loss"][-1], rtol=1e-6)
            np.testing.assert_allclose(logs["lr"][-1], rate, rtol=1e-5)
        weights = hvd.allgather(model.get_weights()[0].reshape(1, -1)).numpy()
        np.testing.assert_array_equal(weights[0], weights[1])

    job(2, check)
