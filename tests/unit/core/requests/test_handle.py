"""A handle is completed once and tells everybody who asks, as often as they ask."""

from __future__ import annotations

import signal
import threading

import pytest

from horovod.core.errors import HorovodInternalError
from horovod.core.requests.handle import Handle
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls


def test_before_and_after() -> None:
    handle = Handle()
    assert not handle.done()
    handle.complete()
    assert handle.done()
    handle.wait()
    handle.wait(0)
    assert handle.error is None
    assert handle.result is None


def test_every_waiting_thread_gets_the_result() -> None:
    handle = Handle()

    def work() -> None:
        handle.result = [1, 2]
        handle.complete()

    def wait() -> object:
        handle.wait(SOON)
        return handle.result

    waiting = ConcurrentCalls(wait, wait, wait, wait)
    threading.Event().wait(0.02)
    work()
    assert waiting.results() == [[1, 2]] * 4


def test_a_wait_that_is_too_short() -> None:
    handle = Handle()
    for seconds in (0, 0.01):
        with pytest.raises(TimeoutError, match="not complete within"):
            handle.wait(seconds)
    assert not handle.done()
    handle.complete()
    handle.wait(0)


def test_waiting_after_somebodys_timeout_still_works() -> None:
    handle = Handle()
    patient, hasty = ConcurrentCalls(lambda: handle.wait(SOON)), ConcurrentCalls(lambda: handle.wait(0.01))
    assert [type(outcome) for outcome in hasty.outcomes()] == [TimeoutError]
    handle.complete()
    assert patient.results() == [None]


def test_an_error_is_raised_anew_each_time() -> None:
    handle = Handle()
    error = HorovodInternalError("rank 3 failed")
    handle.complete(error)
    raised = []
    for _ in range(3):
        with pytest.raises(HorovodInternalError, match="rank 3 failed") as caught:
            handle.wait()
        raised.append(caught.value)
    assert len({id(exception) for exception in [error, *raised]}) == 4
    assert error.__traceback__ is None


def test_every_waiter_gets_an_exception_of_its_own() -> None:
    handle = Handle()
    waiting = ConcurrentCalls(*[lambda: handle.wait(SOON)] * 5)
    handle.complete(ValueError("no", 7))
    outcomes = waiting.outcomes()
    assert [type(outcome) for outcome in outcomes] == [ValueError] * 5
    assert {outcome.args for outcome in outcomes} == {("no", 7)}
    assert len(set(map(id, outcomes))) == 5


def test_an_interrupt_ends_a_wait_and_the_handle_lives_on() -> None:
    handle = Handle()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait(SOON)
    timer.join()
    handle.complete()
    handle.wait()


def test_the_end_function_may_replace_the_error() -> None:
    seen: list[BaseException | None] = []

    def fail(error: BaseException | None) -> BaseException:
        seen.append(error)
        return HorovodInternalError("the way back is blocked")

    handle = Handle(fail)
    handle.complete()
    with pytest.raises(HorovodInternalError, match="the way back is blocked"):
        handle.wait(0)
    assert seen == [None]


def test_a_callback_is_called_once() -> None:
    calls: list[str] = []
    before, after = Handle(), Handle()
    before.then(lambda: calls.append(f"before: {before.done()}"))
    assert not calls
    before.complete(HorovodInternalError("no"))
    assert calls == ["before: True"]
    after.complete()
    after.then(lambda: calls.append("after"))
    assert calls == ["before: True", "after"]


def test_a_callback_is_called_once_when_threads_race() -> None:
    for _ in range(200):
        handle, calls = Handle(), []
        ConcurrentCalls(lambda: handle.complete(), lambda: handle.then(lambda: calls.append(1))).results()  # noqa: B023
        assert calls == [1]


def test_a_callback_that_raises_does_not_block_waiting_threads(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle()
    called = []

    def broken() -> None:
        raise ZeroDivisionError("oh")

    handle.then(lambda: called.append(1))
    handle.then(broken)
    waiting = ConcurrentCalls(lambda: handle.wait(SOON))
    handle.then(lambda: called.append(2))
    handle.complete()
    assert waiting.results() == [None]
    assert called == [2, 1]
    assert "ZeroDivisionError: oh" in caplog.text


def test_an_exception_in_the_end_function_becomes_the_error() -> None:
    def broken(_: BaseException | None) -> BaseException | None:
        raise ZeroDivisionError("oh")

    first, second = Handle(broken), Handle(broken)
    first.complete()
    second.complete(HorovodInternalError("rank 3 failed"))
    with pytest.raises(HorovodInternalError, match=r"processing its result failed: ZeroDivisionError\('oh'\)"):
        first.wait(SOON)
    with pytest.raises(HorovodInternalError, match="rank 3 failed"):
        second.wait(SOON)


def test_a_wait_that_is_interrupted_while_it_drives_leaves_the_collective_to_the_worker_thread() -> None:
    taken: list[Handle] = []

    class Driver:
        def drive(self, handle: Handle) -> None:
            raise KeyboardInterrupt

        def take_over(self, handle: Handle) -> None:
            taken.append(handle)

    handle = Handle(driver=Driver())
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert taken == [handle]
