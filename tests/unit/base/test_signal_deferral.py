"""Signals that come while something is done that must not be interrupted."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from horovod._base import signal_deferral
from horovod._base.signal_deferral import with_signals_deferred

USED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class Rang(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in USED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ring(*_: Any) -> None:
    raise Rang


def test_a_handler_runs_after_the_work_and_what_it_raises_comes_from_there() -> None:
    signal.signal(signal.SIGUSR1, ring)
    steps = []

    def work() -> None:
        steps.append("begun")
        signal.raise_signal(signal.SIGUSR1)
        steps.append("ended")

    with pytest.raises(Rang):
        with_signals_deferred(work)
    assert steps == ["begun", "ended"]


def test_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        with_signals_deferred(signal.raise_signal, signal.SIGINT)


def test_work_returns_what_it_returns_and_raises_what_it_raises() -> None:
    assert with_signals_deferred(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_signals_deferred(divmod, 7, 0)


def test_every_signal_is_delivered_even_if_the_first_handler_raises() -> None:
    heard: list[int] = []

    def note(number: int, frame: Any) -> None:
        heard.append(number)
        raise Rang

    for number in USED:
        signal.signal(number, note)

    def work() -> None:
        for number in USED:
            signal.raise_signal(number)
        assert heard == []

    with pytest.raises(Rang):
        with_signals_deferred(work)
    assert sorted(heard) == sorted(USED)


def test_handlers_are_what_they_were() -> None:
    signal.signal(signal.SIGUSR1, ring)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with_signals_deferred(lambda: signal.raise_signal(signal.SIGUSR2))  # ignored, then and now
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def interrupted_before(instruction: int) -> bool:
    """Raise Rang before that instruction of the search for handlers; whether it has so many."""
    left = itertools.count(instruction, -1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not signal_deferral._handlers.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 0:
            raise Rang
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with_signals_deferred(int)
    except Rang:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_handler_that_has_raised_before_the_work_began_does_not_interrupt_later_work() -> None:
    for instruction in itertools.count():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        with_signals_deferred(int)  # finds no handler
        signal.signal(signal.SIGUSR1, ring)
        if not interrupted_before(instruction):
            break
        ended = False

        def work() -> None:
            nonlocal ended
            signal.raise_signal(signal.SIGUSR1)
            ended = True

        with pytest.raises(Rang):
            with_signals_deferred(work)
        assert ended, f"interrupted before instruction {instruction}"
    assert instruction > 10


def test_on_another_thread_where_no_handler_runs_nothing_is_changed() -> None:
    signal.signal(signal.SIGUSR1, ring)
    seen: list[Any] = []
    thread = threading.Thread(
        target=with_signals_deferred, args=(lambda: seen.append(signal.getsignal(signal.SIGUSR1)),)
    )
    thread.start()
    thread.join()
    assert seen == [ring]


def child_that_reports(report: int) -> int:
    """Fork; the child writes down whether the signals have their handlers, and ends."""
    child = os.fork()
    if child == 0:
        handlers = [signal.getsignal(number) is ring for number in USED]
        os.write(report, bytes(handlers))
        os._exit(0)
    return child


@pytest.mark.parametrize("depth", [1, 3])
def test_a_child_that_another_thread_forks_meanwhile_has_the_handlers(depth: int) -> None:
    for number in USED:
        signal.signal(number, ring)
    reader, writer = os.pipe()
    children: list[int] = []

    def work(further: int) -> None:
        if further:
            with_signals_deferred(work, further - 1)
            return
        signal.raise_signal(signal.SIGUSR1)  # it came to the parent, which has still to deliver it
        thread = threading.Thread(target=lambda: children.append(child_that_reports(writer)))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGUSR1) is not ring

    with pytest.raises(Rang):
        with_signals_deferred(work, depth - 1)
    (child,) = children
    os.waitpid(child, 0)
    assert list(os.read(reader, 100)) == [True] * len(USED)
    os.close(reader)
    os.close(writer)
    assert [signal.getsignal(number) for number in USED] == [ring] * len(USED)
    assert signal_deferral._under_way == []


def test_a_child_of_the_deferred_work_itself_has_the_handlers_and_none_of_the_parents_signals() -> None:
    signal.signal(signal.SIGUSR1, ring)
    children: list[int] = []

    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        children.append(os.fork())

    try:
        with_signals_deferred(work)
        status = 0
    except Rang:
        status = 1
    if children == [0]:
        os._exit(status)
    assert status == 1
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
