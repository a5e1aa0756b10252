"""One device by CUDA's library: streams, events, memory and copies, on a library whose streams run late."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from horovod.comm.cuda.library import Cuda
from horovod.comm.cuda.runtime import CudaRuntime
from horovod.comm.spans import Spans, address_of, layout_of
from recorded_cuda import RecordedCuda
from recorded_nccl import array_at
from time_limits import SOON


@pytest.fixture
def recorded() -> Iterator[RecordedCuda]:
    made = RecordedCuda(device=1)
    yield made
    assert made.breaches == []


@pytest.fixture
def runtime(recorded: RecordedCuda) -> CudaRuntime:
    return CudaRuntime(Cuda(recorded), 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, np.float64, np.complex64])
@pytest.mark.parametrize("value", [0, 3])
def test_memory_is_filled_on_its_stream(recorded: RecordedCuda, runtime: CudaRuntime, dtype: type, value: int) -> None:
    stream = runtime.new_stream()
    made = runtime.allocate(np.dtype(dtype), 1000, stream, value)
    recorded.synchronize(runtime.stream_address(stream))
    assert (array_at(made.addresses[0], 1000, dtype) == np.full(1000, value, dtype)).all()
    assert made.layout.device == runtime.device == "cuda:1"


def test_copies_come_after_what_their_stream_waits_for(recorded: RecordedCuda, runtime: CudaRuntime) -> None:
    theirs, gate = recorded.stream(), threading.Event()
    source, target = np.arange(5.0), np.zeros(5)
    theirs.push(lambda: gate.wait(SOON))
    theirs.push(lambda: source.fill(9))
    with runtime.on(theirs.address):
        marker = runtime.record(runtime.current_stream())
    own = runtime.new_stream()
    runtime.wait(own, marker)
    layout = layout_of(np.dtype(np.float64), (5,), runtime.device)
    runtime.copy(own, Spans(layout, [address_of(source)]), Spans(layout, [address_of(target)]))
    after = runtime.record(own)
    assert not runtime.query(marker) and not runtime.query(after)
    gate.set()
    runtime.wait(None, after)
    assert runtime.query(after) and target.tolist() == [9.0] * 5


def test_without_a_stream_the_callers_work_is_over_when_it_calls(runtime: CudaRuntime) -> None:
    assert runtime.current_stream() is None
    marker = runtime.record(runtime.current_stream())
    assert runtime.query(marker)
    runtime.wait(runtime.new_stream(), marker)


def test_the_current_stream_is_the_calling_threads(recorded: RecordedCuda, runtime: CudaRuntime) -> None:
    seen = []
    with runtime.on(recorded.stream().address):
        other = threading.Thread(target=lambda: seen.append(runtime.current_stream()))
        other.start()
        other.join()
        assert runtime.current_stream() is not None
    assert seen == [None] and runtime.current_stream() is None


def test_released_memory_is_freed(recorded: RecordedCuda, runtime: CudaRuntime) -> None:
    stream = runtime.new_stream()
    made = runtime.allocate(np.dtype(np.float32), 10, stream, 1)
    marker = runtime.record(stream)
    runtime.wait(None, marker)
    del made, marker
    gc.collect()
    recorded.synchronize(stream.address)
    assert recorded.memory == {} and recorded.events == {}
    del stream
    gc.collect()
    assert recorded.streams == {}


def test_the_threads_device_is_as_it_was(recorded: RecordedCuda, runtime: CudaRuntime) -> None:
    with runtime.chosen():
        with runtime.chosen():
            assert recorded.current() == [1, 1]
        assert recorded.current() == [1]
    assert recorded.current() == []


def test_the_devices_context_is_held_as_long_as_the_runtime(recorded: RecordedCuda) -> None:
    made = CudaRuntime(Cuda(recorded), 1)
    assert recorded.retained == 1
    del made
    gc.collect()
    assert recorded.retained == 0
