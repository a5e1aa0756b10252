"""What is held while a device is at work on it, and until when."""

from __future__ import annotations

import gc
import weakref

import pytest

from horovod.comm.base import DeviceFailure
from horovod.core.execution.open_events import FIRST_LOOK_MILLISECONDS, LOOK_MILLISECONDS, OpenEvents


class Event:
    over = False
    failure: BaseException | None = None

    def query(self) -> bool:
        return self.over

    def wait(self) -> None:
        raise AssertionError("nobody waits here")

    def error(self) -> BaseException | None:
        return self.failure


class Memory:
    pass


def test_memory_is_held_until_its_event_and_those_before_it_are_over() -> None:
    events, memory = [Event(), Event()], [Memory(), Memory()]
    known = [weakref.ref(each) for each in memory]
    opened = OpenEvents(10)
    for event in events:
        opened.add(event, "x", memory.pop(0), 0.0)
    events[1].over = True
    opened.look(1.0)
    gc.collect()
    assert all(each() is not None for each in known) and len(opened) == 2
    events[0].over = True
    opened.look(2.0)
    gc.collect()
    assert [each() for each in known] == [None, None] and opened.milliseconds() is None


def test_an_error_of_the_engine_names_the_tensors() -> None:
    event, opened = Event(), OpenEvents(10)
    opened.add(event, "one, two", None, 0.0)
    opened.look(1.0)
    event.failure = RuntimeError("a link is down")
    with pytest.raises(DeviceFailure, match="one, two failed on the device: a link is down"):
        opened.look(2.0)


def test_who_makes_progress_may_take_long_and_who_makes_none_may_not() -> None:
    events, opened = [Event(), Event()], OpenEvents(10)
    for event in events:
        opened.add(event, "x", None, 0.0)
    opened.look(9.0)
    events[0].over = True
    opened.look(9.5)
    opened.look(19.0)
    with pytest.raises(DeviceFailure, match="x is not over on the device 20 seconds after it began"):
        opened.look(20.0)


def test_a_device_that_is_quick_is_looked_at_soon_and_a_slow_one_rarely() -> None:
    opened = OpenEvents(10)
    opened.add(Event(), "x", None, 0.0)
    found = []
    for _ in range(12):
        found.append(opened.milliseconds())
        opened.look(1.0)
    assert found[0] == FIRST_LOOK_MILLISECONDS and found[-1] == LOOK_MILLISECONDS
    opened.add(Event(), "y", None, 1.0)
    assert opened.milliseconds() == FIRST_LOOK_MILLISECONDS
