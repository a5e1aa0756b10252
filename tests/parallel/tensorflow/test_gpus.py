"""Tensors on GPUs in TensorFlow, on stand-ins: a logical CPU device of TensorFlow is the GPU, CUDA and NCCL are recorded.

TensorFlow computes at once on that device. The streams of the recorded CUDA and what NCCL does on them are late, so a
collective that nobody waits for gives wrong numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gpu_ranks
import horovod.tensorflow as hvd
from horovod.core.errors import HorovodInternalError
from jobs import Job, make_job
from ranks import RankPool

GPU = "CPU:1"
STAND_IN = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "TEST_DEVICES": "tensorflow",
}
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8]


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    return make_job(lambda size: ranks(size, STAND_IN, "tensorflow"), "horovod.tensorflow")


@contextlib.contextmanager
def libraries(gpus: int, native: str) -> Iterator[None]:
    """On a rank: CUDA and NCCL are recorded, or C libraries at this path. No rule was broken."""
    if native:
        with importlib.import_module("native_devices").loaded(native) as library:
            yield
            assert library.breaches() == []
        return
    with importlib.import_module("recorded_cuda").with_nccl(gpus) as (cuda, nccl):
        yield
        assert nccl.breaches == [] and cuda.breaches == []


@contextlib.contextmanager
def generation(sets: list[list[int]], gpus: int = 2, native: str = "") -> Iterator[list[Any]]:
    """On a rank: a generation in which NCCL moves the memory of the stand-in, and nothing is left."""
    device: Any = importlib.import_module("horovod.tensorflow.device")
    with contextlib.suppress(RuntimeError):  # TensorFlow has started with them
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    hvd.shutdown()
    made = [hvd.ProcessSet(ranks) for ranks in sets]
    before = device._GPUS, device._FIRST_GPU, device._lacking
    device._GPUS, device._FIRST_GPU = f"device:{GPU}", GPU
    device.tensorflow_devices._lacking = lambda: ""
    try:
        with libraries(gpus, native):
            hvd.init(process_sets=made)
            yield made
            hvd.shutdown()
    finally:
        device._GPUS, device._FIRST_GPU, device.tensorflow_devices._lacking = before


def on(job: Job, size: int, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """``function(*args)`` on every rank, in a generation with NCCL. Keyword ``sets``: process sets, its first argument."""
    sets = keywords.pop("sets", None)
    gpus = keywords.pop("gpus", lambda rank: 2)
    native = keywords.pop("native", "")

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with generation(sets or [], gpus(int(os.environ["HOROVOD_RANK"])), native) as found:
            return function(*args) if sets is None else function(found, *args)

    result: list[Any] = job(size, run, *args, **keywords)
    return result


def made(shape: tuple[int, ...], dtype: tf.DType = tf.float32, factor: int = 1, device: str = GPU) -> Any:
    """This rank's tensor: 0, 1, ... 6, 0, ... times the factor, plus the rank, plus 1."""
    count = int(np.prod(shape))
    with tf.device(device):
        elements = tf.constant([n % 7 * factor + hvd.rank() + 1 for n in range(count)], tf.float64, shape)
        return tf.cast(elements, dtype)


def calls() -> list[str]:
    """What this rank has called of the library that plays NCCL."""
    from horovod.comm.nccl import library

    found: list[str] = library.loaded().functions.names()
    return found


def on_the_gpu(tensor: Any) -> bool:
    return bool(tensor.backing_device.endswith(GPU))


def everything(device: str) -> list[Any]:
    """Each collective, with its results as arrays."""
    found: list[Any] = []
    for dtype in DTYPES:
        x, rows = made((40,), dtype, device=device), made((2 + hvd.rank(), 3), dtype, device=device)
        found.append(hvd.allreduce(x, op=hvd.Sum))
        found.append(hvd.allreduce(x, op=hvd.Max))
        found += [hvd.allgather(rows), hvd.allgather(x)]
        found.append(hvd.broadcast(x, 1))
        found += hvd.alltoall(rows, splits=[1, 1 + hvd.rank()])
        found.append(hvd.reducescatter(made((5, 2), dtype, device=device), op=hvd.Sum))
        if dtype.is_floating:
            found.append(hvd.allreduce(x, prescale_factor=0.5, postscale_factor=4.0))
    found += hvd.grouped_allreduce([made((n,), device=device) for n in (3, 0, 70000, 5)], op=hvd.Sum)
    found += hvd.grouped_allgather([made((n + hvd.rank(), 2), device=device) for n in (0, 1, 2)])
    found += hvd.grouped_reducescatter([made((4,), device=device), made((3, 2), device=device)], op=hvd.Sum)
    found.append(hvd.allreduce(made((), device=device), op=hvd.Sum))
    return [each.numpy().astype(np.float64) for each in found]


def test_the_same_results_as_in_host_memory(job: Job) -> None:
    def on_device() -> list[Any]:
        found = everything(GPU)
        assert {"allreduce", "allgather", "broadcast", "send", "reducescatter"} <= set(calls())
        return found

    on_the_device, in_host_memory = on(job, 2, on_device), job(2, everything, "CPU:0")
    for found, wanted in zip(on_the_device, in_host_memory, strict=True):
        assert len(found) == len(wanted) > 50
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert np.array_equal(one, other), (number, one, other)


def test_the_same_results_by_the_c_functions_of_cuda_and_nccl(job: Job, stand_in: str) -> None:
    def on_device() -> list[Any]:
        from horovod.core.lifecycle.context import running

        assert running().device_engine == "nccl"
        return everything(GPU)

    on_the_device, in_host_memory = on(job, 2, on_device, native=stand_in), job(2, everything, "CPU:0")
    for found, wanted in zip(on_the_device, in_host_memory, strict=True):
        assert len(found) == len(wanted) > 50
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


WHY_NOT = gpu_ranks.why_not_nccl(len(tf.config.list_physical_devices("GPU")))


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it runs")
def test_the_same_results_on_gpus_as_in_host_memory(ranks: Callable[..., RankPool]) -> None:
    """Not on a stand-in, but on the GPUs that there are."""

    def on_gpus() -> list[Any]:
        from horovod.core.lifecycle.context import running

        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:  # else one rank takes all the memory
            tf.config.experimental.set_memory_growth(gpu, True)
        found = everything(f"GPU:{hvd.local_rank() % len(gpus)}")
        assert running().device_engine == "nccl"
        return found

    env = {**gpu_ranks.nccl_env(len(tf.config.list_physical_devices("GPU"))), "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = make_job(lambda size: ranks(size, env), "horovod.tensorflow")
    for found, wanted in zip(job(2, on_gpus, timeout=180), job(2, everything, "CPU:0"), strict=True):
        assert len(found) == len(wanted) > 50
        assert all(np.allclose(one, other, rtol=1e-2) for one, other in zip(found, wanted, strict=True))


def test_results_stay_on_the_gpu_and_inputs_are_not_changed(job: Job) -> None:
    def check() -> None:
        x = made((3,))
        before = x.numpy()
        results = [
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather(x),
            hvd.broadcast(x, 0),
            hvd.reducescatter(x, op=hvd.Sum),
            hvd.alltoall(made((4,))),
        ]
        assert all(map(on_the_gpu, results))
        assert results[2].numpy().tolist() == [1.0, 2.0, 3.0]
        assert np.array_equal(x.numpy(), before)
        assert "cuEventSynchronize" in importlib.import_module("horovod.comm.cuda.library").loaded().functions.calls

    on(job, 2, check)


def test_a_tape_trains_on_the_gpu_as_in_host_memory(job: Job) -> None:
    def train(device: str) -> list[Any]:
        with tf.device(device):
            variables = [tf.Variable(made((4, 3), device=device)), tf.Variable(made((3,), device=device))]
            hvd.broadcast_variables(variables, root_rank=1)
            start = [each.numpy() for each in variables]
            for step in range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((made((2, 4), factor=step, device=device) @ variables[0] + variables[1]) ** 2)
                tape = hvd.DistributedGradientTape(tape)
                for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                    variable.assign_sub(1e-4 * gradient)
            hvd.broadcast_(variables, 0, name="in place")
        return start + [each.numpy() for each in variables]

    def on_device() -> list[Any]:
        found = train(GPU)
        assert calls().count("allreduce") >= 3 and calls().count("broadcast") == 4
        return found

    for found, wanted in zip(on(job, 2, on_device), job(2, train, "CPU:0"), strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert np.allclose(one, other, rtol=1e-6)


def test_gradients_of_operations_are_those_in_host_memory(job: Job) -> None:
    def derive(device: str) -> list[Any]:
        found = []
        for operation in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather,
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
            hvd.alltoall,
        ):
            x = made((4, 2), device=device)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = operation(x)
                loss = tf.reduce_sum(y * y)
            found.append(tape.gradient(loss, x).numpy())
        return found

    for found, wanted in zip(on(job, 2, derive, GPU), job(2, derive, "CPU:0"), strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert np.array_equal(one, other)


def test_sparse_gradients_are_gathered_on_the_gpu(job: Job) -> None:
    def check() -> None:
        with tf.device(GPU):
            slices = tf.IndexedSlices(made((2, 3)), tf.constant([hvd.rank(), 5], tf.int64))
        found = hvd.allreduce(slices, op=hvd.Sum)
        assert found.indices.numpy().tolist() == [0, 5, 1, 5]
        assert found.values.numpy()[:, 0].tolist() == [1.0, 4.0, 2.0, 5.0]
        assert calls().count("allgather") == 2

    on(job, 2, check)


def test_what_nccl_lacks_and_what_tensorflow_keeps_in_host_memory_travel_through_host_memory(job: Job) -> None:
    def check() -> None:
        with tf.device(GPU):
            complexes = tf.constant([1 + 1j]) * (hvd.rank() + 1)
            flags = tf.constant([True, hvd.rank() == 0])
        assert hvd.allreduce(made((4,), tf.int32)).numpy().tolist() == [1, 2, 3, 4]
        assert hvd.allreduce(made((2,), tf.int16), op=hvd.Sum).numpy().tolist() == [3, 5]
        assert hvd.allreduce(complexes, op=hvd.Sum).numpy().tolist() == [3 + 3j]
        assert hvd.allgather(complexes).numpy().tolist() == [1 + 1j, 2 + 2j]
        assert hvd.allreduce(flags, op=hvd.Min).numpy().tolist() == [True, False]
        assert hvd.allreduce(made((2,)), op=hvd.Max, postscale_factor=0.5).numpy().tolist() == [1.0, 1.5]
        hvd.allreduce(made((2,)), op=hvd.Adasum)
        mixed = hvd.grouped_allreduce([made((2,)), made((2,), device="CPU:0")], op=hvd.Sum)
        assert [each.numpy().tolist() for each in mixed] == [[3.0, 5.0], [3.0, 5.0]]
        assert calls() == []

    on(job, 2, check)


def test_functions_of_graphs_travel_through_host_memory_and_the_log_says_so_once(job: Job) -> None:
    def check() -> list[str]:
        told: list[str] = []

        class Told(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                told.append(record.getMessage())

        log = logging.getLogger("horovod.tensorflow")
        handler, before = Told(), log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:

            @tf.function
            def both(x: Any) -> Any:
                return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)

            for _ in range(2):
                total, rows = both(made((2,)))
                assert total.numpy().tolist() == [3.0, 5.0] and rows.numpy().tolist() == [1.0, 2.0, 2.0, 3.0]
            assert calls() == []
            assert hvd.allreduce(made((2,)), op=hvd.Sum).numpy().tolist() == [3.0, 5.0]
            assert calls() != []
        finally:
            log.removeHandler(handler)
            log.setLevel(before)
        return [text for text in told if "graph" in text]

    for told in on(job, 2, check):
        assert len(told) == 1 and "host memory" in told[0]


def test_a_rank_without_a_gpu_makes_all_of_them_use_host_memory(job: Job) -> None:
    def check() -> None:
        x = made((3,), device=GPU if hvd.rank() == 0 else "CPU:0")
        assert hvd.allreduce(x, op=hvd.Sum).numpy().tolist() == [3.0, 5.0, 7.0]
        assert hvd.allgather(x).numpy().tolist() == [1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
        assert calls() == []

    on(job, 2, check, gpus=lambda rank: 2 if rank == 0 else 0)


def test_overlapping_process_sets_have_right_results_and_a_communicator_each(job: Job) -> None:
    def check(sets: list[Any]) -> None:
        mine = [each for each in [*sets, hvd.global_process_set] if each.included()]
        for turn in range(5):
            for each in mine:
                first = sum(rank + 1 for rank in each.ranks)
                found = hvd.allreduce(made((100,), factor=turn), op=hvd.Sum, process_set=each)
                assert found.numpy().tolist() == [len(each.ranks) * turn * (n % 7) + first for n in range(100)]
                rows = hvd.allgather(made((hvd.rank() + 1,), factor=turn), process_set=each)
                wanted = [float(turn * n + rank + 1) for rank in each.ranks for n in range(rank + 1)]
                assert rows.numpy().tolist() == wanted
                root = each.ranks[-1]
                assert hvd.broadcast(made((1,)), root, process_set=each).numpy().tolist() == [root + 1.0]
        assert calls().count("init") == len(mine)

    on(job, 3, check, sets=[[0, 1], [1, 2]])


def test_joined_ranks_make_zeros_on_the_gpu(job: Job) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            assert hvd.join().numpy() in (1, 2)
            return
        mixed = hvd.grouped_allreduce([made((2,)), made((3,), tf.float64)], name="left", op=hvd.Sum)
        assert [each.numpy().tolist() for each in mixed] == [[5.0, 7.0], [5.0, 7.0, 9.0]]
        assert hvd.allreduce(made((1,)), name="least", op=hvd.Min).numpy().tolist() == [2.0]
        assert hvd.allgather(made((1,)), name="rows").numpy().tolist() == [2.0, 3.0]
        assert hvd.broadcast(made((1,)), 2, name="root").numpy().tolist() == [3.0]
        hvd.join()

    on(job, 3, check)


def test_what_cannot_work_is_an_error_and_the_job_goes_on(job: Job) -> None:
    def check(sets: list[Any]) -> None:
        def still_works() -> bool:
            return bool(hvd.allreduce(made((3,)), op=hvd.Sum).numpy().tolist() == [3.0, 5.0, 7.0])

        if hvd.rank() == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
                hvd.allreduce(made((2,)), process_set=sets[0])
        assert still_works()
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched ALLREDUCE tensor shapes.*rank 0: .*on gpu"):
            hvd.allreduce(made((2 + hvd.rank(),)), name="shapes")
        with pytest.raises(HorovodInternalError, match=r"CPU/GPU device selection: One rank's tensor is on cpu"):
            hvd.allreduce(made((2,), device=GPU if hvd.rank() else "CPU:0"), name="devices")
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched data types.*test_gpus"):
            hvd.allreduce(made((2,), tf.float64 if hvd.rank() else tf.float32), name="types", op=hvd.Sum)
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched allgather tensor shapes|dimension"):
            hvd.allgather(made((2, 2 + hvd.rank())), name="columns")
        assert still_works()

    on(job, 2, check, sets=[[0]])


def test_a_second_gpu_of_a_process_is_refused_with_what_to_do(job: Job) -> None:
    def check() -> None:
        from horovod.comm.cuda import library

        hvd.allreduce(made((2,)))
        hvd.allgather_object(None)
        recorded = library.loaded().functions
        recorded.memory_device = 1  # of addresses alone: what is still under way is on the first GPU
        try:
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"is on cuda:1.*use cuda:0.*HOROVOD_GPU_OPERATIONS=HOST"
            ):
                hvd.allreduce(made((2,)))
        finally:
            recorded.memory_device = 0
        assert hvd.allreduce(made((2,)), op=hvd.Sum).numpy().tolist() == [3.0, 5.0]

    on(job, 2, check)


def test_a_rank_that_fails_ends_a_call_that_waits_for_the_gpu(job: Job) -> None:
    def check() -> str:
        from horovod.comm.nccl import library

        x = made((2,))
        hvd.allreduce(x)
        hvd.allgather_object(None)
        if hvd.rank() == 1:
            library.loaded().functions.hold.clear()  # its GPU never comes to the next one
            threading.Timer(0.5, lambda: setattr(library.loaded().functions.comms[1], "state", 6)).start()
        with pytest.raises(HorovodInternalError) as error:
            hvd.allreduce(x, name="x")
        library.loaded().functions.hold.set()
        return str(error.value)

    for text in on(job, 2, check):
        assert "rank 1" in text and "remote process exited" in text, text


def test_a_second_init_changes_nothing(job: Job) -> None:
    def check() -> None:
        device = importlib.import_module("horovod.tensorflow.device")
        hvd.allreduce(made((2,)))
        runtime = device.tensorflow_devices.runtime()
        hvd.init()
        assert hvd.allgather(made((2,))).numpy().tolist() == [1.0, 2.0, 2.0, 3.0]
        assert device.tensorflow_devices.runtime() is runtime

    on(job, 2, check)


def test_host_memory_can_be_forced(job: Job) -> None:
    def check() -> None:
        assert hvd.allreduce(made((3,)), op=hvd.Sum).numpy().tolist() == [3.0, 5.0, 7.0]
        assert calls() == []

    on(job, 2, check, env={"HOROVOD_GPU_OPERATIONS": "HOST"})
