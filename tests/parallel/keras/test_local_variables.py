"""Variables whose gradients stay with each rank, sets of ranks, values, and gradients of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def step_alone(first: Any, second: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The step of one process with learning rate 1: minus the gradients of mean((x @ first @ second - y) ** 2)."""
    hidden = x @ first
    error = 2 * (hidden @ second - y) / y.size
    return -x.T @ (error @ second.T), -hidden.T @ error


@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_of_local_layers_stay_on_their_rank(job: Any, scaled: bool) -> None:
    """The first layer's weights follow each rank's own gradients, divided by the number of ranks unless told not to."""

    def check() -> None:
        import keras

        import horovod.keras as hvd

        def network() -> Any:
            keras.utils.set_random_seed(1)
            return keras.Sequential([keras.layers.Dense(2, use_bias=False), keras.layers.Dense(1, use_bias=False)])

        rank, size = hvd.rank(), hvd.size()
        x = np.random.default_rng(5).normal(size=(size, 4, 3)).astype(np.float32)
        y = np.ones((size, 4, 1), np.float32)

        model = network()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=model.layers[0], scale_local_gradients=scaled
        )
        model.compile(optimizer, loss="mse")  # the layers are built later, by the first batch
        reference = network()
        reference.build((None, 3))
        before = reference.get_weights()
        model.train_on_batch(x[rank], y[rank])
        first, second = (two - one for one, two in zip(before, model.get_weights(), strict=True))
        steps = [step_alone(*before, x[own], y[own]) for own in range(size)]
        np.testing.assert_allclose(first, steps[rank][0] / (size if scaled else 1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(second, np.mean([step[1] for step in steps], axis=0), rtol=1e-4, atol=1e-6)

    job(3, check)


def test_ranks_have_local_layers_of_different_shapes_and_numbers(job: Any) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        keras.utils.set_random_seed(1)
        rank = hvd.rank()
        own = [keras.layers.Dense(2 + rank) for _ in range(rank + 1)]
        shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([*own, keras.layers.Dense(2, trainable=False), shared])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), local_layers=own)
        model.compile(optimizer, loss="mse")
        x = np.random.default_rng(rank).normal(size=(12, 3)).astype(np.float32)
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
        assert len(optimizer._trainable_variables) == 2 * len(own) + 1
        return np.asarray(shared.get_weights()[0]).tolist()

    results = job(3, check)
    assert results[0] == results[1] == results[2] != [[1.0], [1.0]]


def test_a_local_variable_keeps_its_ranks_gradient_in_an_optimizer_of_a_process_set(job: Any) -> None:
    def check(sets: Any) -> None:
        import keras

        import horovod.keras as hvd

        rank = hvd.rank()
        shared, own = (keras.Variable(np.zeros(2, np.float32), name=name) for name in ("shared", "own"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=sets[0])
        optimizer.register_local_var(own)
        optimizer.build([shared, own])
        gradients = [keras.ops.convert_to_tensor(np.full(2, rank + 1.0, np.float32)) for _ in range(2)]
        optimizer.apply(gradients, [shared, own])
        member = rank in (0, 2)
        np.testing.assert_allclose(
            shared.numpy(), -2.0 if member else -(rank + 1.0)
        )  # the mean of ranks 0 and 2, or its own
        np.testing.assert_allclose(own.numpy(), -(rank + 1.0) / (2 if member else 1))

    job(3, check, sets=[[0, 2]])


def test_values_are_reduced_gathered_and_broadcast(job: Any, backend: str) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        array = keras.ops.convert_to_numpy
        assert float(hvd.allreduce(float(rank))) == 1.0
        assert float(hvd.allreduce(float(rank), op=hvd.Sum, name="sum")) == 3.0
        with np.testing.assert_warns(DeprecationWarning):
            assert float(hvd.allreduce(float(rank), average=False)) == 3.0
        with np.testing.assert_raises_regex(ValueError, "supersedes"):
            hvd.allreduce(1.0, average=True, op=hvd.Sum)
        scaled = hvd.allreduce(np.full(3, 2.0, np.float32), op=hvd.Sum, prescale_factor=0.5, postscale_factor=10.0)
        np.testing.assert_array_equal(array(scaled), np.full(3, 10.0 * size))
        half = hvd.allreduce(np.full(3, 1 + 2.0**-14, np.float32), compression=hvd.Compression.fp16)
        assert "float32" in str(half.dtype)
        np.testing.assert_array_equal(array(half), np.ones(3))
        rows = hvd.allgather(np.full((rank + 1, 2), rank, np.int32))
        np.testing.assert_array_equal(array(rows)[:, 0], [0, 1, 1, 2, 2, 2])
        np.testing.assert_array_equal(array(hvd.broadcast(np.full(2, rank, np.float32), 1)), [1, 1])
        part = hvd.reducescatter(np.arange(8, dtype=np.float32).reshape(4, 2), op=hvd.Sum)
        wanted = np.split(np.arange(8).reshape(4, 2) * size, [2, 3])[rank]
        np.testing.assert_array_equal(array(part), wanted)
        assert keras.ops.is_tensor(part)

    job(3, check)


@pytest.mark.parametrize("dense", [True, False])
def test_embeddings_train_as_in_one_process(job: Any, dense: bool) -> None:
    """On TensorFlow these are sparse: everybody's rows are gathered, or they are made dense first."""

    def check() -> Any:
        import keras

        import horovod.keras as hvd

        def network() -> Any:
            keras.utils.set_random_seed(1)
            return keras.Sequential(
                [
                    keras.layers.Input((2,), dtype="int32"),
                    keras.layers.Embedding(10, 3),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )

        rank, size = hvd.rank(), hvd.size()
        x = np.random.default_rng(5).integers(0, 10, (size, 4, 2))
        y = np.ones((size, 4, 1), np.float32)
        model, alone = network(), network()
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), sparse_as_dense=dense), loss="mse"
        )
        alone.compile(keras.optimizers.SGD(0.5, momentum=0.5), loss="mse")
        for _ in range(3):
            model.train_on_batch(x[rank], y[rank])
            alone.train_on_batch(x.reshape(-1, 2), y.reshape(-1, 1))
        for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)

    job(2, check)
