"""Where the threads of this process are in their Python code, for reports of stalls and for what a rank writes down."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import msgspec

from horovod.observe.call_site import is_users

OWN = "horovod-"
"""How the names of the runtime's own threads begin."""
MOST_FRAMES = 100
MOST_LINES = 16
"""How many threads a report of a stall names."""


class Frame(msgspec.Struct, frozen=True):
    """One call that a thread is in.

    Attributes:
        code: the line's text; "" if it is not known.
        users: whether the file is the user's own, and no library's.
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
        own: whether it is one of the runtime's own.
        frames: the calls that it is in, innermost first.
    """

    name: str
    main: bool
    own: bool
    frames: list[Frame]

    @property
    def place(self) -> Frame | None:
        """The innermost line of the user's own code; the innermost line at all if there is none."""
        return next((frame for frame in self.frames if frame.users), self.frames[0] if self.frames else None)


def states() -> list[ThreadState]:
    """All threads of this process but the calling one, the main thread first. For any thread.

    No file is read: :func:`with_code` adds the text of each line.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main, calling = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == calling and ident != main:
            continue
        thread = threads.get(ident)
        name = f"thread {ident}" if thread is None else thread.name
        found.append(ThreadState(name, ident == main, name.startswith(OWN), _frames(frame)))
    return sorted(found, key=lambda state: (not state.main, state.own, state.name))


def lines() -> list[str]:
    """The present line of each thread but the main thread and the runtime's own, in words."""
    others = [state for state in states() if not state.main and not state.own]
    found = [
        f"{each.name}: {each.place.file}:{each.place.line} in {each.place.function}" for each in others if each.place
    ]
    left = len(found) - MOST_LINES
    return [*found[:MOST_LINES], f"{left} more"] if left > 0 else found


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


def _frames(frame: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None and len(found) < MOST_FRAMES:
        file, line = frame.f_code.co_filename, frame.f_lineno or 0
        name = file.encode(errors="backslashreplace").decode()  # of a file, which need not be valid Unicode
        found.append(Frame(name, line, frame.f_code.co_name, "", is_users(file)))
        frame = frame.f_back
    return found
