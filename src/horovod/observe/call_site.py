"""Where in the user's script something happens: for errors that quote a line, and for reports on who waits where."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).resolve().parent.parent) + "/"
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_GENERATED = "__autograph_generated_file"  # what TensorFlow makes of the user's function
_STANDARD = str(Path(threading.__file__).resolve().parent) + "/"


def is_users(filename: str) -> bool:
    """Whether a file is the user's own code: not of this package, of a library, or generated."""
    if filename.startswith(("<frozen", _OURS, _STANDARD)) or _GENERATED in filename:
        return False
    return not any(part in filename for part in _LIBRARIES)


_REMEMBERED = 4096
"""Files and lines. Notebooks and compilers of graphs make new ones for ever."""

_users: dict[str, bool] = {}


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; the outermost frame looked at where there is none."""
    last = frame
    while frame is not None:
        filename = frame.f_code.co_filename
        known = _users.get(filename)
        if known is None:
            if len(_users) >= _REMEMBERED:
                _users.clear()
            known = _users[filename] = is_users(filename)
        if known:
            return frame
        last, frame = frame, frame.f_back
    return last


_lines: dict[tuple[int, int], tuple[CodeType, str]] = {}
"""Lines that were asked for, by code and place in it. To find a line's number takes longer than to find its code."""


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    place = id(code), frame.f_lasti
    known = _lines.get(place)
    if known is None or known[0] is not code:
        if len(_lines) >= _REMEMBERED:
            _lines.clear()
        # A file's name need not be valid Unicode; what is sent to other ranks must be.
        line = f"{code.co_filename}:{frame.f_lineno}".encode(errors="backslashreplace").decode()
        known = _lines[place] = code, line
    return known[1]


class _Instead(threading.local):
    line = ""


_instead = _Instead()


@contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """A block in which :func:`caller` is ``line`` on this thread: for a framework that runs later what the user wrote there."""
    before, _instead.line = _instead.line, line
    try:
        yield
    finally:
        _instead.line = before


def caller(above: int = 0) -> str:
    """``file:line`` of the user's code that led to this call.

    Args:
        above: how many of the innermost frames, beginning with that of who asks, are known not to be the user's.
    """
    if _instead.line:
        return _instead.line
    frame = sys._getframe(1 + above)
    known = _lines.get((id(frame.f_code), frame.f_lasti))
    if known is not None and known[0] is frame.f_code:  # mostly it is the user's, and has been here before
        return known[1]
    return _line(_users_frame(frame))


def main_thread() -> str:
    """Where this process's main thread is, as ``file:line in function``; callable from any thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    found = _users_frame(frame)
    return f"{_line(found)} in {found.f_code.co_name}" if found is not None else "unknown"


def raised_at(error: BaseException) -> str:
    """``file:line`` of the user's code at which an exception passed last."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
