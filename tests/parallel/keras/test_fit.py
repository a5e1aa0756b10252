"""``fit`` with a distributed optimizer trains as one process would on all ranks' batches together, on every backend.

Each test trains on every rank and, with plain Keras, in the same process on the concatenated batches; weights must agree to
float32 rounding, and be the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from keras_ranks import batches
from part import some

BATCH = 4
STEPS = 5

Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda keras: keras.optimizers.SGD(0.1),
    "momentum": lambda keras: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.2),
    "Adam": lambda keras: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.9), epsilon=1e-4, global_clipnorm=0.5
    ),
    "AdamW": lambda keras: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-4, clipvalue=0.05),
    "RMSprop with a moving average": lambda keras: keras.optimizers.RMSprop(
        0.005, momentum=0.5, use_ema=True, ema_overwrite_frequency=3, epsilon=1e-4
    ),
    "accumulating": lambda keras: keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2, clipnorm=0.2),
    "scaled by a constant": lambda keras: keras.optimizers.SGD(0.1, loss_scale_factor=16.0),
    "scaled dynamically": lambda keras: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.3), dynamic_growth_steps=2
    ),
}


def network(keras: Any, seed: int = 7) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def data(size: int, rank: int | None = None) -> tuple[Any, Any]:
    return batches(size, rank, STEPS, BATCH, (6, 3))


def fit(model: Any, optimizer: Any, size: int, rank: int | None, **compile: Any) -> Any:
    model.compile(optimizer, loss="mse", **compile)
    x, y = data(size, rank)
    model.fit(x, y, batch_size=BATCH * (size if rank is None else 1), epochs=2, shuffle=False, verbose=0)
    return model


def alone(keras: Any, optimizer: Any, size: int, seed: int = 7) -> Any:
    """What one process gets from all ranks' batches; on rank 0 only, to which the others are compared."""
    import horovod.keras as hvd

    if hvd.rank() != 0:
        return None
    eager = keras.backend.backend() == "tensorflow"  # so few steps are not worth a graph
    return fit(network(keras, seed), optimizer, size, None, run_eagerly=eager)


def assert_close(found: Any, wanted: Any, **tolerance: float) -> None:
    if wanted is None:
        return
    for one, two in zip(found.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


def assert_moved(model: Any, untouched: Any) -> None:
    assert any(
        np.abs(one - two).max() > 1e-2 for one, two in zip(model.get_weights(), untouched.get_weights(), strict=True)
    )


def digest(model: Any) -> bytes:
    return b"".join(np.ascontiguousarray(weight).tobytes() for weight in model.get_weights())


def all_equal(results: list[Any]) -> bool:
    return results.count(results[0]) == len(results)


EVERY_BACKEND = ("momentum", "accumulating", "scaled dynamically")
"""The optimizers whose training reaches code of the backend: reductions in a graph, inside a condition or not."""
IN_A_GRAPH = (*EVERY_BACKEND, "RMSprop with a moving average")
"""The optimizers that make a graph of their own kind: the others train without one, which takes half the time."""


@pytest.mark.parametrize("size", some([2, 3], [3]))
def test_fit_trains_as_one_process_with_all_data_does(job: Any, backend: str, size: int) -> None:
    def check(chosen: Collection[str]) -> bytes:
        import keras

        import horovod.keras as hvd

        digests = b""
        for name in chosen:
            make = OPTIMIZERS[name]
            way = {} if name in IN_A_GRAPH else {"run_eagerly": True}
            model = fit(network(keras), hvd.DistributedOptimizer(make(keras)), size, hvd.rank(), **way)
            wanted = alone(keras, make(keras), size)
            try:
                assert_close(model, wanted)
                assert_moved(model, network(keras))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            digests += digest(model)
        return digests

    chosen = ("momentum",) if size == 3 else OPTIMIZERS.keys() if backend == "tensorflow" else EVERY_BACKEND
    assert all_equal(job(size, check, list(chosen)))


WRAPPINGS: dict[str, dict[str, Any]] = {
    "two requests": {"groups": 2},
    "more requests than gradients": {"groups": 100},
    "predivided": {"gradient_predivide_factor": 4.0},
    "summed": {"op": 1},
}


def test_fit_trains_as_one_process_with_every_argument_of_the_optimizer(job: Any) -> None:
    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        digests = b""
        wanted = alone(keras, keras.optimizers.SGD(0.1, momentum=0.9), hvd.size())
        for name, arguments in WRAPPINGS.items():
            rate = 0.1 / hvd.size() if "op" in arguments else 0.1
            wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), **arguments)
            model = fit(network(keras), wrapped, hvd.size(), hvd.rank())
            try:
                assert_close(model, wanted, rtol=1e-3, atol=1e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            digests += digest(model)
        model = network(keras)
        lists = [model.trainable_variables[:2], [model.trainable_variables[5]]]
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), groups=lists)
        assert_close(fit(model, wrapped, hvd.size(), hvd.rank()), wanted)
        return digests

    assert all_equal(job(2, check, timeout=200))


def test_compressed_gradients_train_close_to_one_process_and_alike_on_all_ranks(job: Any) -> None:
    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        wanted = alone(keras, keras.optimizers.SGD(0.1), hvd.size())
        for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
            wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
            model = fit(network(keras), wrapped, hvd.size(), hvd.rank())
            assert_close(model, wanted, rtol=0, atol=tolerance)
            if wanted is not None:
                with np.testing.assert_raises(AssertionError):
                    assert_close(model, wanted, rtol=0, atol=1e-7)
        return digest(model)

    assert all_equal(job(2, check))


@pytest.mark.parametrize("averaged", [True, False])
def test_several_passes_for_one_step_train_as_one_process_and_communicate_once(job: Any, averaged: bool) -> None:
    """Gradients of two batches accumulate, by default as sums, and only the second batch communicates."""

    def check() -> bytes:
        import keras

        import horovod.keras as hvd
        from horovod.core.lifecycle import context

        rate = 0.1 if averaged else 0.05
        wrapped = hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.5),
            backward_passes_per_step=2,
            average_aggregated_gradients=averaged,
        )
        model = fit(network(keras), wrapped, hvd.size(), hvd.rank())
        plain = keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2)
        assert_close(model, alone(keras, plain, hvd.size()))
        assert_moved(model, network(keras))

        sent = [0]
        worker = context.current().workers[0]
        submit = worker.submit
        worker.submit = lambda *entry, **how: (sent.__setitem__(0, sent[0] + 1), submit(*entry, **how))[1]
        x, y = data(hvd.size(), hvd.rank())
        for step in range(4):
            model.train_on_batch(x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])
        keras.ops.convert_to_numpy(model.weights[0])
        worker.submit = submit
        assert sent[0] == 2, sent
        return digest(model)

    assert all_equal(job(2, check, env={"HOROVOD_CHECK": "off"}))


def test_all_ranks_begin_with_the_weights_of_rank_0(job: Any) -> None:
    """Every rank starts somewhere else; the callback brings all to where rank 0 is before the first step."""

    def check() -> tuple[bytes, int]:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        model = network(keras, seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (rank + 1), epsilon=1e-4)), loss="mse")
        x, y = data(size, rank)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        assert callback.broadcast_done
        assert_close(model, alone(keras, keras.optimizers.Adam(0.01, epsilon=1e-4), size, seed=0))
        return digest(model), int(model.optimizer.iterations)

    results = job(3, check)
    assert all_equal(results) and results[0][1] == 2 * STEPS


def test_eager_steps_several_per_execution_and_train_on_batch_train_as_one_process(job: Any, backend: str) -> None:
    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        ways = [{"run_eagerly": True}] if backend == "torch" else [{"run_eagerly": True}, {"steps_per_execution": 2}]
        wanted = alone(keras, keras.optimizers.SGD(0.1), size)
        for way in ways:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            assert_close(fit(network(keras), optimizer, size, rank, **way), wanted)
        model = network(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        x, y = data(size, rank)
        for _ in range(2):
            for step in range(STEPS):
                part = slice(step * BATCH, (step + 1) * BATCH)
                model.train_on_batch(x[part], y[part])
        assert_close(model, wanted)
        return digest(model)

    assert all_equal(job(2, check))


def test_a_rank_that_has_evaluated_before_trains_as_the_others(job: Any) -> None:
    """Its metrics exist when the training step is traced; those of the others come to be then."""

    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        model = network(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", metrics=["mae"])
        x, y = data(hvd.size(), hvd.rank())
        if hvd.rank() == 0:
            model.evaluate(x, y, verbose=0)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return digest(model)

    assert all_equal(job(2, check))


def test_an_uneven_last_batch_trains_alike_on_all_ranks(job: Any) -> None:
    """The last batch is smaller, which Keras compiles anew: both ranks have 6 samples in batches of 4."""

    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        model = network(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        x, y = data(hvd.size(), hvd.rank())
        model.fit(x[:6], y[:6], batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
        return digest(model)

    assert all_equal(job(2, check))


def test_two_models_in_turn_do_not_mix_their_gradients(job: Any) -> None:
    """Two models of the same shapes, as in a GAN, with optimizers of their own; one rank has made another model before."""

    def check() -> tuple[bytes, bytes]:
        import keras

        import horovod.keras as hvd

        rank, size = hvd.rank(), hvd.size()
        if rank == 1:
            network(keras)  # so that names of variables differ between ranks
        models = [network(keras, seed) for seed in (1, 2)]
        for model in models:
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        x, y = data(size, rank)
        for step in range(STEPS):
            part = slice(step * BATCH, (step + 1) * BATCH)
            for model in models:
                model.train_on_batch(x[part], y[part])
        for seed, model in zip((1, 2), models, strict=True):
            wanted = network(keras, seed)
            wanted.compile(keras.optimizers.SGD(0.1), loss="mse")
            x, y = data(size)
            wanted.fit(x, y, batch_size=BATCH * size, shuffle=False, verbose=0)
            assert_close(model, wanted)
        return digest(models[0]), digest(models[1])

    assert all_equal(job(2, check))


def test_a_custom_train_step_applies_reduced_gradients(job: Any, backend: str) -> None:
    """A custom training loop: whoever applies gradients with the distributed optimizer gets them reduced."""

    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
        variable = keras.Variable(np.zeros(3, np.float32))
        optimizer.build([variable])
        gradient = keras.ops.convert_to_tensor(np.arange(3, dtype=np.float32) + hvd.rank())
        if backend == "jax":
            own = [v.value for v in optimizer.variables]
            (changed,), _ = optimizer.stateless_apply(own, [gradient], [variable.value])
            variable.assign(changed)
        optimizer.apply_gradients([(gradient, variable)])
        wanted = -0.5 * (np.arange(3) + (hvd.size() - 1) / 2) * (2 if backend == "jax" else 1)
        np.testing.assert_allclose(variable.numpy(), wanted)
        return bytes(variable.numpy().tobytes())

    assert all_equal(job(3, check))


def test_optimizers_for_parts_of_a_model_train_as_in_one_process(job: Any) -> None:
    """``keras.optimizers.MultiOptimizer``, chosen by a function, which no file could hold."""

    def check() -> bytes:
        import keras

        import horovod.keras as hvd

        if not hasattr(keras.optimizers, "MultiOptimizer"):
            return b"this Keras has none"

        def make() -> Any:
            kernels = keras.optimizers.Adam(0.01, epsilon=1e-4)
            others = keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2)
            return keras.optimizers.MultiOptimizer(lambda each: kernels if "kernel" in each.path else others)

        model = fit(network(keras), hvd.DistributedOptimizer(make()), hvd.size(), hvd.rank())
        assert_close(model, alone(keras, make(), hvd.size()))
        with np.testing.assert_raises_regex(ValueError, "gradient_accumulation_steps of its optimizers"):
            hvd.DistributedOptimizer(make(), backward_passes_per_step=2)
        return digest(model)

    assert all_equal(job(2, check))


def test_a_job_of_one_trains_as_without_horovod(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.Adam(0.01, epsilon=1e-4), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        model = fit(network(keras), optimizer, 1, 0)
        plain = keras.optimizers.Adam(0.01, epsilon=1e-4, gradient_accumulation_steps=2)
        assert_close(model, alone(keras, plain, 1))
        assert float(hvd.allreduce(3.0)) == 3.0

    job(1, check)
