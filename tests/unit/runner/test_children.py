"""Processes that the launcher starts: none is left, wherever a signal interrupts it."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from horovod.control.wakeup import WakeUp
from horovod.runner import children
from horovod.runner.agent.base import HostFacts
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import ProcessPlan
from horovod.runner.event_loop import Loop
from horovod.runner.probes import ProbeResult, run_probes
from interruptions import every_point
from leaks import direct_children
from time_limits import SOON


class Ended(BaseException):
    """What a handler of SIGTERM raises, as horovodrun's does before the job begins."""


@pytest.fixture
def handler() -> Iterator[None]:
    def raise_it(*_: Any) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, raise_it)
    yield
    signal.signal(signal.SIGTERM, before)


def living() -> set[int]:
    """Children of this process that have not ended; a child that has ended may wait to be reaped.

    Some may be those of fixtures that last as long as the tests.
    """
    return {pid for pid in direct_children() if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


def raised_before_line(number: int, work: Callable[[], Any], last: Any) -> bool:
    """Call ``work()``, and send SIGTERM before the line of that number; whether the function ``last`` was called before it."""
    count, came = 0, False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count, came
        if came or count >= number:
            return None
        if event == "call" and frame.f_code is last.__code__:
            came = True
            signal.raise_signal(signal.SIGTERM)
        elif event == "line":
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGTERM)
        return trace

    sys.settrace(trace)
    try:
        work()
    except Ended as error:
        assert not isinstance(error.__context__, TimeoutError), f"it was waited for, before line {number}"
    finally:
        sys.settrace(None)
    return came


def test_a_program_runs_to_its_end() -> None:
    done = children.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], 60)
    assert done == (3, b"out\n", b"err\n")


def test_a_signal_before_any_line_ends_a_program_that_hangs(handler: None) -> None:
    before = living()
    for number in range(1, 10_000):
        over = raised_before_line(
            number, lambda: children.run(["/bin/sh", "-c", "sleep 1000"], SOON), selectors.EpollSelector.select
        )
        assert living() <= before
        if over:
            break
    assert over and number > 100


def test_an_exception_at_any_place_leaves_no_program() -> None:
    before = living()
    points = 0
    for _ in every_point(lambda _: children.run(["true"], 60)):
        assert living() <= before
        points += 1
    assert points > 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_signal_while_it_is_waited_for_ends_it_at_once(number: int, tmp_path: Path) -> None:
    def raise_it(*_: Any) -> None:
        raise Ended

    def signalled(interrupted: int) -> children.Done:
        sender = subprocess.Popen(["/bin/sh", "-c", f"kill -{int(number)} {os.getpid()}"])
        try:
            return children.run(["sleep", "1000"], 1000, cancel=interrupted)
        finally:
            sender.wait()

    before, handler = living(), signal.signal(number, raise_it)
    try:
        with pytest.raises(Ended):
            children.interruptible(signalled)
    finally:
        signal.signal(number, handler)
    assert living() <= before


def test_a_signal_that_another_thread_gets_ends_it(handler: None) -> None:
    def signalled(interrupted: int) -> children.Done:
        threading.Thread(target=take_signal).start()
        return children.run(["sleep", "1000"], 1000, cancel=interrupted)

    before = living()
    with pytest.raises(Ended):
        children.interruptible(signalled)
    assert living() <= before


def take_signal() -> None:
    """Get SIGTERM in this thread, as the kernel may decide for a signal to the process: a wait of the main thread goes on."""
    time.sleep(0.3)  # so that the main thread most likely waits
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


@pytest.mark.parametrize("to_the_process", [True, False], ids=["to the process", "to a thread"])
def test_probes_in_threads_end_with_a_signal(handler: None, to_the_process: bool) -> None:
    def probe(cancel: int) -> ProbeResult:
        if to_the_process:
            children.run(["/bin/sh", "-c", f"kill -TERM {os.getpid()}; sleep 1000"], 1000, cancel=cancel)
        else:
            take_signal()
            children.run(["sleep", "1000"], 1000, cancel=cancel)
        raise AssertionError

    def hangs(cancel: int) -> ProbeResult:
        with pytest.raises(children.Cancelled):
            children.run(["sleep", "1000"], 1000, cancel=cancel)
        return ProbeResult(True, "")

    before = living()
    with pytest.raises((Ended, children.Cancelled)) as caught:
        run_probes({"one": probe, "other": hangs})
    assert caught.type is Ended
    assert living() <= before


def test_what_a_process_started_and_what_closes_its_streams_is_ended_with_it(tmp_path: Path) -> None:
    note = tmp_path / "child"
    cancel = WakeUp()
    cancel.set()
    with pytest.raises(TimeoutError):
        children.run(["/bin/sh", "-c", f"sleep 1000 & echo $! > '{note}'; exec >&- 2>&-; wait"], 1.0)
    with pytest.raises(children.Cancelled):
        children.run(["sleep", "1000"], 1000, cancel=cancel.fileno())
    cancel.close()
    deadline = time.monotonic() + SOON
    while psutil.pid_exists(int(note.read_text())) and psutil.Process(int(note.read_text())).status() != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_exception_at_any_place_of_a_ranks_start_leaves_it_to_its_agent() -> None:
    before = living()
    points = 0
    agents: list[LocalAgent] = []
    loop = Loop()

    def start(_: int) -> None:
        agents.append(
            LocalAgent(
                [], loop, lambda *_: None, HostFacts("", 1, (), None), mark=b"", guardian=None, inherits_input=False
            )
        )
        agents[-1].start(dict(os.environ), [ProcessPlan(0, ("sleep", "1000"), {}, False)])

    def end() -> None:
        for agent in agents:
            agent.kill()
        deadline = time.monotonic() + SOON
        while not living() <= before:
            assert time.monotonic() < deadline, living()
            time.sleep(0.01)
        agents.clear()

    for _ in every_point(start):
        end()
        points += 1
    end()
    loop.close()
    gc.collect()
    subprocess._cleanup()  # reaps those whose start was interrupted, which have ended
    assert points > 3


def test_no_exception_skips_a_part_of_a_cleanup() -> None:
    for _ in every_point(lambda _: check_cleanup()):
        pass


def check_cleanup() -> None:
    done: list[int] = []
    cleanup = children.Cleanup()
    for number in range(3):
        cleanup.callback(done.append, number)
    try:
        cleanup.__exit__(None, None, None)
    finally:
        assert done in ([], [2, 1, 0])
