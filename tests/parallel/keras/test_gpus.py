"""Gradients on GPUs in Keras on JAX, on stand-ins: CUDA and NCCL are recorded, and the GPU's memory is the host's.

What XLA computes before a callback is late, on a recorded stream, and so is what the callback puts there. After the callback
the stand-in does what the rest of the computation does on a GPU: it comes when that stream has come there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpu_ranks
from horovod.comm.cuda import library
from jobs import Job, make_job
from keras_ranks import POOL, env_of
from ranks import RankPool

SEVERAL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    return make_job(lambda size: ranks(POOL, env_of("jax"), "keras"), "horovod.keras")


def late(real: Callable[..., Any], cuda: Any) -> Callable[..., Any]:
    """JAX's buffer_callback as on a GPU."""

    def buffer_callback(callback: Callable[..., None], shapes: Any, **options: Any) -> Any:
        def on_stream(context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
            stream = cuda.stream()
            for output in outputs:
                array = np.asarray(output)
                stream.push(functools.partial(np.copyto, array, array.copy()))
                array.fill(7)
            try:
                callback(SimpleNamespace(stream=stream.address), outputs, *inputs)
            finally:
                cuda.synchronize(stream.address)

        return real(on_stream, shapes, **options)

    return buffer_callback


@contextlib.contextmanager
def generation(gpus: int = 2) -> Iterator[Any]:
    """On a rank: a generation in which NCCL moves the memory of the stand-in; no rule was broken."""
    import horovod.keras as hvd

    recorded: Any = importlib.import_module("recorded_cuda")
    backend: Any = importlib.import_module("horovod._keras.backends.jax_backend")
    hvd.shutdown()
    names = ("_computes_on_host", "_in_host_memory", "buffer_callback")
    before = {name: getattr(backend, name) for name in names}
    lacking = backend.jax_devices._lacking
    try:
        with recorded.with_nccl(gpus) as (cuda, nccl):
            backend._computes_on_host = lambda: False
            backend._in_host_memory = lambda buffers: False
            backend.buffer_callback = late(before["buffer_callback"], cuda)
            backend.jax_devices._lacking = lambda: ""
            hvd.init()
            yield cuda
            hvd.shutdown()
            assert nccl.breaches == [] and cuda.breaches == []
    finally:
        for name, value in before.items():
            setattr(backend, name, value)
        backend.jax_devices._lacking = lacking
        backend.jax_devices.forget()


def on(job: Job, size: int, function: Callable[..., Any], gpus: Callable[[int], int] = lambda rank: 2) -> list[Any]:
    """``function(cuda)`` on every rank, in a generation with NCCL."""

    @functools.wraps(function)
    def run() -> Any:
        with generation(gpus(int(os.environ["HOROVOD_RANK"]))) as cuda:
            return function(cuda)

    return job(size, run, env=SEVERAL)


def calls() -> list[str]:
    """What this rank has called of the library that plays NCCL."""
    from horovod.comm.nccl import library

    found: list[str] = library.loaded().functions.names()
    return found


def reducer(**settings: Any) -> Callable[..., Any]:
    """``reduce(gradients, cut, op, factor)`` in a compiled computation."""
    import jax

    from horovod._bindings.compression import NoneCompressor
    from horovod._keras.backends.jax_backend import JaxReducer
    from horovod._keras.settings import checked

    made = JaxReducer(checked(compression=NoneCompressor, **settings))

    def reduce(gradients: Sequence[Any], cut: Any = None, op: Any = None, factor: float = 1.0) -> list[Any]:
        from horovod._bindings.reductions import Sum

        variables = [
            SimpleNamespace(name=f"w{number}", dtype=each.dtype, shape=each.shape)
            for number, each in enumerate(gradients)
        ]

        def step(*gradients: Any) -> list[Any]:
            doubled = [each + each for each in gradients]
            return [each + 1 for each in made(doubled, variables, cut, Sum if op is None else op, factor)]

        return list(jax.jit(step)(*gradients))

    return reduce


def test_gradients_of_every_type_are_reduced_in_one_request_or_several(job: Job) -> None:
    def check(cuda: Any) -> None:
        from jax import numpy as jnp

        import horovod.keras as hvd

        for cut in (None, [[0, 2], [1], [3, 4, 5]]):
            types = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.float32, jnp.float32]
            shapes = [(3, 2), (5,), (70,), (4,), (0, 3), (300000,)]
            gradients = [
                jnp.full(shape, hvd.rank() + number + 1, dtype)
                for number, (shape, dtype) in enumerate(zip(shapes, types, strict=True))
            ]
            for number, (found, given) in enumerate(zip(reducer()(gradients, cut), gradients, strict=True)):
                assert found.dtype == given.dtype and found.shape == given.shape
                wanted = sum(2 * (rank + number + 1) for rank in range(2)) + 1
                assert np.array_equal(np.asarray(found, np.float64), np.full(given.shape, wanted)), number
        halves = reducer()([jnp.full((4,), hvd.rank() + 1.0)], op=hvd.Average, factor=0.5)
        assert np.asarray(halves[0]).tolist() == [2.5] * 4
        assert "allreduce" in calls()
        assert "cuEventSynchronize" not in cuda.calls, "the host waits for the device"

    on(job, 2, check)


def _gpus_of_jax() -> int:
    """As the system shows them: JAX itself would take most of their memory."""
    try:
        plugins = importlib.util.find_spec("jax_plugins.xla_cuda12") or importlib.util.find_spec(
            "jax_plugins.xla_cuda13"
        )
    except ModuleNotFoundError:
        plugins = None
    return library.visible() if plugins is not None else 0


WHY_NOT = gpu_ranks.why_not_nccl(_gpus_of_jax())


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it runs")
def test_gradients_are_reduced_on_gpus(ranks: Callable[..., RankPool]) -> None:
    """Not on a stand-in, but on the GPUs that there are."""

    count = _gpus_of_jax()

    def check() -> None:
        import jax
        from jax import numpy as jnp

        import horovod.keras as hvd
        from horovod.core.lifecycle.context import running

        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank() % count))
        types = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.float32]
        gradients = [jnp.full((70,), hvd.rank() + number + 1, dtype) for number, dtype in enumerate(types)]
        for number, found in enumerate(reducer()(gradients)):
            assert np.array_equal(np.asarray(found, np.float64), np.full(70, 4 * number + 7.0)), number
        assert running().device_engine == "nccl"

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    env = {
        **env_of("jax"),
        **gpu_ranks.nccl_env(count),
        "CUDA_VISIBLE_DEVICES": visible,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2",
    }
    make_job(lambda size: ranks(size, env), "horovod.keras")(2, check, timeout=180)


def test_fit_trains_as_in_host_memory(job: Job) -> None:
    def train(cuda: Any = None) -> list[Any]:
        import keras

        import horovod.keras as hvd

        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), loss="mse")
        random = np.random.default_rng(hvd.rank())
        x, y = (random.normal(size=(12, width)).astype(np.float32) for width in (6, 3))
        first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[first])
        assert cuda is None or calls().count("allreduce") >= 6
        return list(model.get_weights())

    for found, wanted in zip(on(job, 2, train), job(2, train), strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_what_nccl_lacks_travels_through_host_memory(job: Job) -> None:
    def check(cuda: Any) -> None:
        from jax import numpy as jnp

        import horovod.keras as hvd

        found = reducer()([jnp.full((3,), hvd.rank() + 1, jnp.int16)])
        assert np.asarray(found[0]).tolist() == [7, 7, 7]
        assert calls() == []

    on(job, 2, check)


def test_a_rank_without_a_gpu_makes_all_of_them_use_host_memory(job: Job) -> None:
    def check(cuda: Any) -> None:
        from jax import numpy as jnp

        import horovod.keras as hvd

        found = reducer()([jnp.full((3,), hvd.rank() + 1.0)])
        assert np.asarray(found[0]).tolist() == [7, 7, 7]
        assert calls() == []

    on(job, 2, check, gpus=lambda rank: 2 * rank)


def test_ranks_that_disagree_get_an_error_and_train_on(job: Job) -> None:
    def check(cuda: Any) -> None:
        import jax
        from jax import numpy as jnp

        import horovod.keras as hvd

        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)factor.*rank 0.*rank 1"):
            reducer()([jnp.ones(4), jnp.ones(5)], cut=[[0], [1]], factor=1.0 + hvd.rank())[0].block_until_ready()
        found = reducer()([jnp.full((3,), hvd.rank() + 1.0)])
        assert np.asarray(found[0]).tolist() == [7, 7, 7]

    on(job, 2, check)


def test_a_step_that_was_compiled_for_nccl_says_what_to_do_without_it(job: Job) -> None:
    def check(cuda: Any) -> None:
        import jax
        from jax import numpy as jnp

        import horovod.keras as hvd
        from horovod._bindings.compression import NoneCompressor
        from horovod._bindings.reductions import Sum
        from horovod._keras.backends.jax_backend import JaxReducer
        from horovod._keras.settings import checked

        made = JaxReducer(checked(compression=NoneCompressor))
        step = jax.jit(lambda x: made([x], [SimpleNamespace(name="w", dtype="float32", shape=(2,))], None, Sum, 1.0)[0])
        assert np.asarray(step(jnp.ones(2))).tolist() == [2, 2]
        hvd.shutdown()
        os.environ["HOROVOD_GPU_OPERATIONS"] = "HOST"
        try:
            hvd.init()
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"compiled for an engine.*model\.compile"):
                step(jnp.ones(2)).block_until_ready()
        finally:
            del os.environ["HOROVOD_GPU_OPERATIONS"]

    on(job, 2, check)
