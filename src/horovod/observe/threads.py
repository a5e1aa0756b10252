"""The positions of this process's threads in their Python code, for reports of stalls and for flight recorders.

:mod:`faulthandler` reads the frames, in one call that holds the interpreter lock, so no thread runs meanwhile. Frame objects of
other threads (``sys._current_frames()``) are not used: these threads run on while ``f_back`` is followed, which can crash the
process.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import threading
from collections.abc import Iterator, Sequence

import msgspec

from horovod.observe.call_site import is_users

OWN = "horovod-"
"""The prefix of the names of the runtime's own threads."""
MOST_LINES = 16
"""How many threads a report of a stall names."""


class Frame(msgspec.Struct, frozen=True):
    """One call that a thread is in.

    Attributes:
        code: the line's text; "" if it is not known.
        users: whether the file is the user's own and not of a library.
    """

    file: str
    line: int
    function: str
    code: str = ""
    users: bool = False


class ThreadState(msgspec.Struct, frozen=True):
    """One thread.

    Attributes:
        main: whether it is the process's main thread.
        own: whether the runtime has started it.
        frames: its call stack, innermost first.
        ident: its number in this process (``threading.get_ident``).
    """

    name: str
    main: bool
    own: bool
    frames: list[Frame]
    ident: int = 0

    @property
    def location(self) -> Frame | None:
        """The innermost line of the user's own code; if there is none, the innermost line."""
        return next((frame for frame in self.frames if frame.users), self.frames[0] if self.frames else None)


def states() -> list[ThreadState]:
    """All threads of this process but the calling one, the main thread first. For any thread.

    No source file is read: :func:`with_code` adds the text of each line.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main, calling = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, frames in parsed(_dumped()):
        if ident == calling and ident != main:
            continue
        thread = threads.get(ident)
        name = f"thread {ident}" if thread is None else thread.name
        found.append(ThreadState(name, ident == main, name.startswith(OWN), frames, ident))
    return sorted(found, key=lambda state: (not state.main, state.own, state.name))


def main_thread() -> str:
    """The present line of this process's main thread, as ``file:line in function``. For any thread."""
    location = next((state.location for state in states() if state.main), None)
    return "unknown" if location is None else f"{location.file}:{location.line} in {location.function}"


def lines() -> list[str]:
    """The present line of each thread but the main thread and the runtime's own, as text."""
    others = [state for state in states() if not state.main and not state.own]
    found = [
        f"{each.name}: {each.location.file}:{each.location.line} in {each.location.function}"
        for each in others
        if each.location
    ]
    left = len(found) - MOST_LINES
    return [*found[:MOST_LINES], f"{left} more"] if left > 0 else found


_ENDLESS_WAITS = {
    ("threading.py", "wait"): "waiter.acquire()",  # of a condition, event or queue, without a time limit
    ("thread.py", "_worker"): "work_item = work_queue.get(block=True)",  # a thread of a pool without work
}
"""Calls that end only when another thread of this process ends them: by file of the standard library and function, the line."""
_LOOPS = {
    ("torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop"),
    ("multiprocessing/queues.py", "_feed"),
    ("tqdm/_monitor.py", "run"),
    ("tensorboard/summary/writer/event_file_writer.py", "run"),
}
"""The loops of threads of libraries that call no code of a script."""
_STANDARD_LIBRARY = (threading.__file__.removesuffix("threading.py"),)


def is_parked(state: ThreadState) -> bool:
    """Whether a thread can submit nothing before another thread of this process does something.

    It waits without a time limit in one of Python's own waits, or it belongs to a library and never calls a script.
    """
    if not state.frames:
        return False
    if not any(each.users for each in state.frames) and any(
        each.file.endswith(file) and each.function == function for each in state.frames for file, function in _LOOPS
    ):
        return True
    inner = state.frames[0]
    line = _ENDLESS_WAITS.get((inner.file.rpartition("/")[2], inner.function))
    if line is None or not inner.file.startswith(_STANDARD_LIBRARY):
        return False
    return linecache.getline(inner.file, inner.line).strip() == line


def with_code(found: Sequence[ThreadState]) -> list[ThreadState]:
    """The same, with the text of each line. Reads files."""
    return [
        msgspec.structs.replace(
            state,
            frames=[
                msgspec.structs.replace(frame, code=linecache.getline(frame.file, frame.line).strip()[:200])
                for frame in state.frames
            ],
        )
        for state in found
    ]


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def _dumped() -> str:
    """faulthandler's text about all threads: at most 100 threads, and the 100 innermost calls of each."""
    with os.fdopen(os.memfd_create("horovod-stacks", os.MFD_CLOEXEC), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("ascii", "backslashreplace")


def parsed(dumped: str) -> Iterator[tuple[int, list[Frame]]]:
    """The identifiers of the threads in a dump of faulthandler, and the calls that they are in, innermost first."""
    frames: list[Frame] | None = None
    for line in dumped.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            frames = []
            yield int(thread[1], 16), frames
            continue
        call = _CALL.match(line)
        if call is not None and frames is not None:
            file, number, function = call.groups(default="???")
            file = _unescaped(file)
            frames.append(Frame(file, int(number) if number.isdigit() else 0, _unescaped(function), "", is_users(file)))


def _unescaped(text: str) -> str:
    """The name that faulthandler has written in ASCII. Escapes that are not valid Unicode stay."""

    def character(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or match[3], 16)
        return match[0] if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)

    return _ESCAPED.sub(character, text)
