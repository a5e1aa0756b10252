"""What is in flight on one rank, and for which submissions a resting worker thread is woken. No thread, no worker thread."""

from __future__ import annotations

import time

import numpy as np
import pytest

from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import Decision, Operation
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker.in_flight import InFlight
from horovod.core.worker.waiting import COALESCE_MILLISECONDS, COALESCE_SECONDS
from unit.core.workers import LARGE, allreduce_request


class Driver:
    def drive(self, handle: Handle) -> None:
        raise AssertionError("nobody waits here")

    def take_over(self, handle: Handle) -> None:
        pass


@pytest.fixture
def requests() -> InFlight:
    return InFlight(Driver())


def entry(name: str = "x", length: int = 4, since: float = 0.0) -> Entry:
    array = np.zeros(length, np.float32)
    return Entry(allreduce_request(name, (length,)), [array], [array], None, Handle(), since)


def asleep(requests: InFlight) -> None:
    assert requests.begin_wait(busy=False) == -1


def test_they_are_taken_once_in_the_order_of_submission(requests: InFlight) -> None:
    entries = [entry(name) for name in "cab"]
    for each in entries:
        requests.add(each, held=False, awaited=False)
    assert requests.waiting()
    assert requests.take() == entries
    assert requests.take() == []
    assert not requests.waiting() and not requests.none()
    assert requests.oldest() is entries[0]
    assert requests.latest is entries[-1].handle


def test_a_name_is_free_again_when_it_is_finished(requests: InFlight) -> None:
    first = entry()
    requests.add(first, held=False, awaited=False)
    with pytest.raises(ValueError, match=r"same name as another tensor .* The name is 'x'"):
        requests.add(entry(), held=False, awaited=False)
    x, y = (Decision(-1, name, Operation.ALLREDUCE) for name in "xy")
    assert requests.batch([x, y]) == [(x, first), (y, None)]
    assert requests.finish([(y, None), (x, first)]) == [None, first]
    assert requests.finish([(x, first)]) == [None]
    assert requests.none() and requests.oldest() is None
    requests.add(entry(), held=False, awaited=False)


def test_a_held_request_is_in_flight_and_not_announced(requests: InFlight) -> None:
    late = entry()
    asleep(requests)
    assert not requests.add(late, held=True, awaited=False)
    assert requests.take() == [] and not requests.none()
    assert late.handle.driver is None
    assert requests.release(late)
    assert requests.take() == [late]


def test_a_withdrawn_request_cannot_be_released(requests: InFlight) -> None:
    late = entry()
    requests.add(late, held=True, awaited=False)
    assert requests.withdraw(late)
    assert not requests.withdraw(late)
    asleep(requests)
    assert not requests.release(late)
    assert requests.take() == []


def test_a_failure_is_everybodys_for_ever(requests: InFlight) -> None:
    entries = [entry(name) for name in "ab"]
    for each in entries:
        requests.add(each, held=False, awaited=False)
    assert requests.fail(HorovodInternalError("first")) == entries
    assert requests.fail(HorovodInternalError("second")) == []
    assert requests.none() and requests.take() == []
    with pytest.raises(HorovodInternalError, match="first"):
        requests.add(entry(), held=False, awaited=False)


def test_only_small_ones_may_be_driven_and_only_where_somebody_drives(requests: InFlight) -> None:
    small, large = entry("small"), entry("large", LARGE)
    for each in (small, large):
        requests.add(each, held=False, awaited=False)
    assert isinstance(small.handle.driver, Driver) and large.handle.driver is None
    alone = entry()
    InFlight(None).add(alone, held=False, awaited=True)
    assert alone.handle.driver is None


@pytest.mark.parametrize(
    ("length", "awaited", "woken"), [(4, False, True), (4, True, False), (LARGE, False, True), (LARGE, True, True)]
)
def test_a_sleeping_worker_is_woken_unless_the_caller_drives(
    requests: InFlight, length: int, awaited: bool, woken: bool
) -> None:
    asleep(requests)
    assert requests.add(entry(length=length), held=False, awaited=awaited) is woken
    assert requests.add(entry("next"), held=False, awaited=False) is not woken  # once is enough
    requests.end_wait()
    assert not requests.add(entry("awake"), held=False, awaited=False)


def test_a_busy_worker_does_not_sleep(requests: InFlight) -> None:
    assert requests.begin_wait(busy=True) == 0
    requests.add(entry(), held=False, awaited=False)
    assert requests.begin_wait(busy=False) == 0


def test_submissions_coalesce_after_an_announcement_while_an_answer_is_due(requests: InFlight) -> None:
    requests.announced(coalesce=True)
    asleep(requests)  # nothing is in flight
    requests.add(entry(), held=False, awaited=False)
    requests.take()
    announced = time.monotonic()  # or later, however busy the machine is
    requests.announced(coalesce=True)
    assert requests.begin_wait(busy=False) == COALESCE_MILLISECONDS
    assert not requests.add(entry("soon", since=announced), held=False, awaited=False)
    assert requests.add(entry("later", since=time.monotonic() + 2 * COALESCE_SECONDS), held=False, awaited=False)
    requests.take()
    requests.announced(coalesce=False)
    asleep(requests)


def test_standby_ends_for_a_request_that_no_thread_drives(requests: InFlight) -> None:
    assert requests.begin_standby()
    assert not requests.add(entry("small"), held=False, awaited=False)
    assert requests.add(entry("large", LARGE), held=False, awaited=False)
    requests.end_wait()
    assert not requests.begin_standby()  # it is still to be announced
    requests.take()
    assert not requests.begin_standby()  # and then to be carried out
    requests.finish(requests.batch([Decision(-1, "large", Operation.ALLREDUCE)]))
    assert requests.begin_standby()


def test_standby_ignores_held_requests(requests: InFlight) -> None:
    late = entry()
    requests.add(late, held=True, awaited=False)
    assert requests.begin_standby()
    assert requests.release(late)
    requests.end_wait()
    assert not requests.begin_standby()


def test_no_standby_before_a_taken_over_collective_is_done(requests: InFlight) -> None:
    assert requests.begin_standby()
    handle = Handle()
    assert requests.leave_to_worker(handle)
    requests.end_wait()
    assert not requests.begin_standby()
    assert not requests.leave_to_worker(handle)
    handle.complete()
    assert requests.begin_standby()


def test_a_sleeping_worker_takes_over_an_unannounced_request(requests: InFlight) -> None:
    handle = Handle()
    asleep(requests)
    assert not requests.leave_to_worker(handle)
    requests.add(entry(), held=False, awaited=True)
    assert requests.leave_to_worker(handle)


def test_quick_requests_can_be_taken_and_put_back(requests: InFlight) -> None:
    first, second, third = entry("first"), entry("second"), entry("third")
    assert requests.take_quick(first.handle, 2) == []
    requests.add(first, held=False, awaited=True)
    assert requests.take_quick(second.handle, 2) == []  # it is not in flight
    assert requests.take_quick(first.handle, 0) == []
    assert requests.take_quick(first.handle, 2) == [first]
    assert requests.take_quick(first.handle, 2) == []
    requests.add(second, held=False, awaited=True)
    assert requests.take_quick(second.handle, 2) == []  # nobody knows whether the first is announced
    requests.put_back([first])
    assert requests.take_quick(first.handle, 2) == [first, second]
    requests.put_back([first, second])
    requests.add(third, held=False, awaited=True)
    assert requests.take_quick(third.handle, 2) == []
    second.handle.leave_to_worker()
    assert requests.take_quick(third.handle, 3) == []
    assert requests.take() == [first, second, third]
    requests.fail(HorovodInternalError("it is over"))
    requests.put_back([first])
    assert requests.take() == []
