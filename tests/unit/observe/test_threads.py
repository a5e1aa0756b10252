"""Where the threads of a process are: read from what faulthandler writes, also while they run on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.observe import threads
from horovod.observe.threads import Frame, ThreadState
from time_limits import SOON

Result = TypeVar("Result")

HERE = str(Path(__file__))


def elsewhere(function: Callable[[], Result]) -> Result:
    """What a function returns on another thread."""
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(SOON)
    (result,) = found
    return result


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """A block beside which a thread waits for an event in this file."""
    started, end = threading.Event(), threading.Event()

    def waits_here() -> None:
        started.set()
        end.wait(SOON)

    thread = threading.Thread(target=waits_here, name=name)
    thread.start()
    try:
        assert started.wait(SOON)
        yield
    finally:
        end.set()
        thread.join(SOON)


def test_another_thread_is_found_at_its_line() -> None:
    with waiting("loader"):
        state = next(state for state in threads.states() if state.name == "loader")
    assert not state.main and not state.own
    assert "waits_here" in [frame.function for frame in state.frames[1:]]  # within Event.wait()
    location = state.location
    assert location is not None and (location.file, location.function) == (HERE, "waits_here") and location.users
    (with_code,) = threads.with_code([state])
    assert with_code.location is not None and "(SOON)" in with_code.location.code


def test_the_main_thread_comes_first_and_the_calling_thread_is_left_out() -> None:
    with waiting("horovod-worker"), waiting("loader"):
        found = elsewhere(threads.states)
    assert found[0].main and found[0].location is not None and found[0].location.file == HERE
    names = [state.name for state in found[1:]]
    assert names.index("loader") < names.index("horovod-worker")
    assert not any(frame.function == "states" for state in found for frame in state.frames)


def test_where_the_main_thread_is_can_be_told_from_another() -> None:
    location, _, function = elsewhere(threads.main_thread).partition(" in ")
    assert location.startswith(f"{HERE}:")
    assert function == "elsewhere"


def test_lines_name_neither_the_main_thread_nor_the_runtimes_own() -> None:
    with waiting("horovod-worker"), waiting("loader"):
        found = [line for line in threads.lines() if HERE in line]
    assert len(found) == 1 and found[0].startswith("loader: ") and found[0].endswith(" in waits_here")


def test_only_so_many_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = Frame("train.py", 3, "load")
    states = [ThreadState(f"loader {number}", False, False, [frame]) for number in range(threads.MOST_LINES + 5)]
    monkeypatch.setattr(threads, "states", lambda: states)
    assert len(threads.lines()) == threads.MOST_LINES + 1
    assert threads.lines()[-1] == "5 more"


def test_threads_that_run_on_are_read_many_times() -> None:
    end = threading.Event()

    def deep(calls: int) -> int:
        return 0 if calls == 0 else deep(calls - 1) + 1

    def runs() -> None:
        while not end.is_set():
            deep(50)

    running = [threading.Thread(target=runs, name="runs") for _ in range(3)]
    for thread in running:
        thread.start()
    try:
        for _ in range(300):
            found = [state for state in threads.states() if state.name == "runs"]
            assert len(found) == 3
            for state in found:
                assert {frame.function for frame in state.frames} <= {
                    *("deep", "runs", "run", "is_set", "_bootstrap", "_bootstrap_inner")
                }
    finally:
        end.set()
        for thread in running:
            thread.join(SOON)


DUMP = r"""Thread 0x00007f1c2b7fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/user/caf\xe9/\u4e2d\U0001f600.py", line 12 in na\xefve
  File ???, line ??? in ???

Thread 0x00007f1c2bfff640 [loader] (most recent call first):
  <no Python frame>

Current thread 0x00007f1c34a51740 [a (strange) name] (most recent call first):
  File "<stdin>", line 1 in <module>
  ...
"""


def test_a_dump_is_read() -> None:
    assert list(threads.parsed(DUMP)) == [
        (
            0x7F1C2B7FE640,
            [
                Frame("/usr/lib/python3.11/threading.py", 324, "wait", "", threads.is_users("/usr/lib/python3.11/x")),
                Frame("/home/user/café/中😀.py", 12, "naïve", "", True),
                Frame("???", 0, "???", "", True),
            ],
        ),
        (0x7F1C2BFFF640, []),
        (0x7F1C34A51740, [Frame("<stdin>", 1, "<module>", "", True)]),
    ]


def as_faulthandler_writes(name: str) -> str:
    """A name in ASCII: ``\\xhh``, ``\\uhhhh`` or ``\\Uhhhhhhhh`` for what is not printable ASCII."""
    return "".join(
        character
        if " " <= character <= "~"
        else f"\\x{ord(character):02x}"
        if ord(character) < 0x100
        else f"\\u{ord(character):04x}"
        if ord(character) < 0x10000
        else f"\\U{ord(character):08x}"
        for character in name
    )


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\\"), min_size=1))
def test_names_of_files_are_read_as_they_are(name: str) -> None:
    dump = f'Thread 0x1f (most recent call first):\n  File "{as_faulthandler_writes(name)}", line 7 in f\n'
    ((_, frames),) = threads.parsed(dump)
    assert [(frame.file, frame.line, frame.function) for frame in frames] == [(name, 7, "f")]


@given(st.lists(st.sampled_from(["\\", "x", "u", "U", "d", "8", "0", "f", '"', " in ", ", line 3"])).map("".join))
def test_no_name_fails(name: str) -> None:
    dump = f'Current thread 0x1f (most recent call first):\n  File "{name}", line 7 in f\n'
    ((_, frames),) = threads.parsed(dump)
    (frame,) = frames
    frame.file.encode()  # it can be told to others


def test_a_real_name_beyond_ascii(tmp_path: Path) -> None:
    file = tmp_path / "café-中.py"
    file.write_text("def naïve(function):\n    return function()\n")
    space: dict[str, Callable[[Callable[[], list[ThreadState]]], list[ThreadState]]] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    found = space["naïve"](lambda: elsewhere(threads.states))
    assert (str(file), 2, "naïve") in [(frame.file, frame.line, frame.function) for frame in found[0].frames]


def parks(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait()


def waits_a_while(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait(SOON)


def reads_a_queue(started: threading.Event, end: threading.Event) -> None:
    started.set()
    items: queue.Queue[None] = queue.Queue()
    threading.Thread(target=lambda: (end.wait(SOON), items.put(None))).start()
    items.get()


def sleeps(started: threading.Event, end: threading.Event) -> None:
    started.set()
    while not end.is_set():
        time.sleep(0.2)


def _innermost(state: ThreadState) -> str:
    return state.frames[0].function if state.frames else ""


@pytest.mark.parametrize(
    ("target", "parked"), [(parks, True), (reads_a_queue, True), (waits_a_while, False), (sleeps, False)]
)
def test_a_thread_is_parked_if_only_another_thread_can_wake_it(
    target: Callable[[threading.Event, threading.Event], None], parked: bool
) -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=target, args=(started, end), name="observed")
    thread.start()

    def state() -> ThreadState:
        return next(each for each in threads.states() if each.name == "observed")

    try:
        assert started.wait(SOON)
        deadline = time.monotonic() + SOON
        while _innermost(state()) not in ("wait", "sleeps") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state().ident == thread.ident
        assert threads.is_parked(state()) == parked
    finally:
        end.set()
        thread.join(SOON)


def test_threads_of_a_pool_without_work_are_parked_and_loops_of_libraries_are() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        pool.submit(int).result()
        deadline = time.monotonic() + SOON
        while not any(threads.is_parked(each) for each in threads.states() if each.name.startswith("pool")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    loop = Frame("/lib/site-packages/torch/utils/data/_utils/pin_memory.py", 30, "_pin_memory_loop")
    inner = Frame("/lib/python3/multiprocessing/connection.py", 400, "_recv")
    assert threads.is_parked(ThreadState("pin", False, False, [inner, loop]))
    assert not threads.is_parked(ThreadState("pin", False, False, [inner, Frame("train.py", 3, "f", users=True), loop]))
    assert not threads.is_parked(ThreadState("other", False, False, [inner]))
    assert not threads.is_parked(ThreadState("unknown", False, False, []))
