"""What users see when something goes wrong in the middle of ``fit``, and graphs that TensorFlow could not run otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs import make_job
from keras_ranks import tensorflow_pool
from ranks import Death


def line(keras: Any, outputs: int = 1, **compile: Any) -> Any:
    import horovod.keras as hvd

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(outputs)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", **compile)
    return model


def fit(model: Any, callbacks: Any = (), steps: int = 20) -> None:
    x, y = np.ones((2 * steps, 2), np.float32), np.ones((2 * steps, model.output_shape[-1]), np.float32)
    model.fit(x, y, batch_size=2, verbose=0, callbacks=list(callbacks))


def test_ranks_with_different_optimizers_get_an_error_that_names_them(job: Any, backend: str) -> None:
    """Both ranks hear how each of them made its optimizer, and where, and can go on."""

    def check(backend: str) -> str:
        import keras

        import horovod.keras as hvd

        factor = 1.0 + hvd.rank()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=factor)
        model.compile(wrapped, loss="mse")
        message = ""
        try:
            fit(model)
        except Exception as error:
            if backend == "tensorflow":
                import tensorflow as tf

                assert isinstance(error, tf.errors.UnknownError), type(error)
            message = str(error)
        assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()
        return message

    for message in job(2, check, backend):
        assert "Mismatched prescale and/or postscale factors" in message, message
        assert "rank 0: allreduce(Average)" in message and "rank 1: allreduce(Average)" in message, message
        assert "prescaled by 0.5 postscaled by 2 at " in message and "test_failures.py" in message, message


def test_a_rank_that_dies_in_the_middle_of_fit_ends_fit_on_the_others(job: Any, backend: str) -> None:
    """The others end with an error that names it."""

    def check() -> str:
        import os
        import signal

        import keras

        import horovod.keras as hvd

        class Strike(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                float(np.asarray(logs["loss"]))
                if batch == 3 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            fit(line(keras), [Strike()])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    results = job(3, check, dies={1})
    assert isinstance(results[1], Death)
    for rank in (0, 2):
        assert "rank 1" in results[rank], results[rank]
        if backend == "tensorflow":
            assert results[rank].startswith("UnknownError"), results[rank]


def test_a_step_compiled_as_a_whole_trains_alike_and_tensorflow_says_that_it_is_not(job: Any, backend: str) -> None:
    """TensorFlow: said, and left out. JAX: works. PyTorch: compiled around the collectives."""

    def check(backend: str) -> Any:
        import warnings

        import keras

        found = []
        for compiled in (True, False):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                model = line(keras, jit_compile=compiled)
                fit(model, steps=4)
            texts = [str(warning.message) for warning in told if "XLA" in str(warning.message)]
            assert len(texts) == (1 if compiled and backend == "tensorflow" else 0), texts
            found.append(model.get_weights())
        for one, two in zip(*found, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
        return [weight.tolist() for weight in found[0]]

    if backend == "torch":
        pytest.skip(
            "the compiler of PyTorch takes minutes on few cores; see test_a_compiled_step_breaks_its_graph_at_the_reduction"
        )
    results = job(2, check, backend)
    assert results[0] == results[1]


def test_a_compiled_step_breaks_its_graph_at_the_reduction(job: Any, backend: str) -> None:
    """PyTorch's compiler goes on after the reduction."""
    if backend != "torch":
        pytest.skip("concerns PyTorch only")

    def check() -> float:
        import keras
        import torch

        import horovod.keras as hvd

        variable = keras.Variable(np.zeros(2, np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])

        @torch.compile(backend="eager")
        def step(gradient: Any) -> Any:
            twice = gradient * 2
            optimizer.apply([twice], [variable])
            return twice + 1

        with torch.no_grad():
            step(torch.full((2,), float(hvd.rank())))
        return float(variable.numpy()[0])

    assert job(2, check) == [-1.0] * 2


def test_one_thread_between_operations_does_not_deadlock(ranks: Any) -> None:
    """TensorFlow with a single thread for operations, in every rank: nothing waits in that thread."""
    job = make_job(lambda size: tensorflow_pool(ranks, 3), "horovod.keras")

    def check() -> Any:
        import keras
        import tensorflow as tf

        assert tf.config.threading.get_inter_op_parallelism_threads() == 1  # init() sets it to OMP_NUM_THREADS
        model = line(keras, steps_per_execution=3)
        fit(model)
        return [weight.tolist() for weight in model.get_weights()]

    results = job(2, check)
    assert results[0] == results[1]
