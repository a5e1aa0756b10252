"""Collectives that a device carries out after the call: what is held, for how long, and what ends the wait for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from horovod._base.config import Config
from horovod.comm.base import Completion, DeviceFailure
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Layout, Spans, Vectors
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import Decision, Operation, Request, TensorSpec
from horovod.core.requests.batch import Entry, execute
from horovod.core.requests.handle import Handle
from horovod.core.worker.open_events import FIRST_LOOK_MILLISECONDS, LOOK_MILLISECONDS, OpenEvents
from horovod.core.worker.worker import WorkerThread
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import Watch


class Event:
    def __init__(self, reached: bool = True) -> None:
        self.reached = reached
        self.over = False
        self.failure: BaseException | None = None

    def begun(self) -> bool:
        return self.reached

    def query(self) -> bool:
        return self.over

    def wait(self) -> None:
        raise AssertionError("the host was to wait for the device")

    def error(self) -> BaseException | None:
        return self.failure


class Memory:
    """What is held; weak references tell when it is let go of."""


def test_memory_is_held_until_the_device_is_done_with_it_and_with_what_came_before() -> None:
    events, first, second = OpenEvents(10), Event(), Event()
    memory = [Memory(), Memory()]
    known = [weakref.ref(each) for each in memory]
    events.add(first, "a", memory.pop(0), 0.0)
    events.add(second, "b", memory.pop(0), 0.0)
    second.over = True
    events.look(1.0)
    gc.collect()
    assert len(events) == 2 and all(each() is not None for each in known)  # they are over in their order
    first.over = True
    events.look(2.0)
    gc.collect()
    assert [each() for each in known] == [None, None] and events.milliseconds() is None


def test_a_device_that_is_quick_is_looked_at_soon_and_a_slow_one_rarely() -> None:
    events = OpenEvents(10)
    events.add(Event(), "a", None, 0.0)
    found = []
    for _ in range(12):
        found.append(events.milliseconds())
        events.look(1.0)
    assert found[0] == FIRST_LOOK_MILLISECONDS and found[-1] == LOOK_MILLISECONDS
    events.add(Event(), "b", None, 1.0)
    assert events.milliseconds() == FIRST_LOOK_MILLISECONDS


def test_an_error_of_the_device_names_the_collective() -> None:
    events, event = OpenEvents(10), Event()
    events.add(event, "gradient.7", None, 0.0)
    event.failure = RuntimeError("remote process exited")
    with pytest.raises(DeviceFailure, match=r"gradient\.7 failed on the device: remote process exited"):
        events.look(1.0)


def test_a_device_that_makes_no_progress_is_given_up_after_the_limit() -> None:
    events, first, second = OpenEvents(10), Event(), Event()
    events.add(first, "a", None, 0.0)
    events.add(second, "b", None, 0.0)
    events.look(9.0)
    first.over = True
    events.look(9.5)  # progress: the limit begins anew
    events.look(19.0)
    with pytest.raises(DeviceFailure, match=r"b has not completed on the device 10.5 seconds after it began there"):
        events.look(20.0)


def test_a_device_may_compute_for_any_time_before_it_comes_to_a_collective() -> None:
    events, event = OpenEvents(10), Event(reached=False)
    events.add(event, "a", None, 0.0)
    for now in (5.0, 15.0, 60.0):
        events.look(now)
    event.reached = True
    events.look(69.0)
    with pytest.raises(DeviceFailure, match=r"a has not completed .* raise HOROVOD_NCCL_TIMEOUT_SECONDS"):
        events.look(71.0)


class Device(SingleCommunicator):
    """Notes what it is handed, as a device's engine would get it."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[Vectors] = []
        self.events: list[Event] = []

    def allreduce(  # type: ignore[override]  # a device's engine returns its event
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> Completion:
        self.handed.append(inputs)
        self.events.append(Event())
        return self.events[-1]


def entry_of(name: str, data_type: DataType, addresses: Sequence[int]) -> tuple[Decision, Entry]:
    specs = tuple(TensorSpec(f"{name}.{number}", data_type, (4,)) for number in range(len(addresses)))
    vectors = Spans(Layout.of(data_type.numpy, [4] * len(addresses), "cuda:0"), list(addresses))
    request = Request(Operation.ALLREDUCE, name, specs, ReduceOp.SUM)
    return Decision(-1, name, Operation.ALLREDUCE), Entry(request, vectors, vectors, None, Handle(), 0.0)


def test_a_devices_vectors_reach_its_engine_by_address_and_the_last_event_completes_the_batch() -> None:
    device = Device()
    batch = [
        entry_of("a", DataType.FLOAT32, [0x1000, 0x2000]),
        entry_of("b", DataType.FLOAT32, [0x3000]),
        entry_of("c", DataType.FLOAT16, [0x4000]),
    ]
    completion = execute(device, [0], batch)
    found = [(each.layout.dtype, each.layout.device, list(each.addresses)) for each in device.handed]  # type: ignore[union-attr]
    assert found == [
        (np.float32, "cuda:0", [0x1000, 0x2000, 0x3000]),
        (np.float16, "cuda:0", [0x4000]),
    ]
    assert completion is device.events[-1]


def test_an_engine_for_host_memory_refuses_a_devices_vectors() -> None:
    with pytest.raises(ValueError, match="vectors in the memory of cuda:0 were handed to an engine for host memory"):
        execute(SingleCommunicator(), [0], [entry_of("a", DataType.FLOAT32, [0x1000])])


def test_a_handle_is_done_when_its_collective_is_in_the_devices_queue_and_a_later_error_ends_the_job() -> None:
    device, watch = Device(), Watch()
    worker = WorkerThread("0", [0], 0, {}, device, Config(), watch, lambda *_: None)
    worker.start()
    try:
        _, entry = entry_of("a", DataType.FLOAT32, [0x1000])
        worker.submit(entry)
        entry.handle.wait(SOON)
        assert entry.handle.event is device.events[0] and not device.events[0].over
        device.events[0].failure = RuntimeError("remote process exited")
        wait_until(lambda: bool(watch.reports))
        ((rank, reason, _),) = watch.reports
        assert rank == 0 and "a failed on the device: remote process exited" in reason
    finally:
        worker.abort(HorovodInternalError("the end"))
        assert worker.join(SOON)
        worker.close()
