"""Finds the line of the user's script that led to a call, or from which an exception was raised, for errors and warnings."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).resolve().parent.parent) + "/"
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_GENERATED = "__autograph_generated_file"  # what TensorFlow makes of the user's function
_STANDARD = str(Path(threading.__file__).resolve().parent) + "/"


def is_users(filename: str) -> bool:
    """Whether a file is the user's own code: not part of this package or of a library, and not generated."""
    if filename.startswith(("<frozen", _OURS, _STANDARD)) or _GENERATED in filename:
        return False
    return not any(part in filename for part in _LIBRARIES)


_REMEMBERED = 4096
"""How many files and lines are remembered. Notebooks and compilers of graphs make new ones all the time."""

_users: dict[str, bool] = {}


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; the outermost frame if there is none."""
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
"""Lines that were found before, by code and instruction. Finding a line's number takes longer than finding its code."""


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    instruction = id(code), frame.f_lasti
    known = _lines.get(instruction)
    if known is None or known[0] is not code:
        if len(_lines) >= _REMEMBERED:
            _lines.clear()
        # The name of a file need not be valid Unicode; a message to other ranks must be.
        line = f"{code.co_filename}:{frame.f_lineno}".encode(errors="backslashreplace").decode()
        known = _lines[instruction] = code, line
    return known[1]


class _Override(threading.local):
    line = ""


_override = _Override()


@contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """A block in which :func:`caller` returns ``line`` on this thread: for a framework that runs the user's line later."""
    before, _override.line = _override.line, line
    try:
        yield
    finally:
        _override.line = before


def caller(ours: int = 0) -> str:
    """``file:line`` of the user's code that led to this call.

    Args:
        ours: how many frames, from the calling function's outwards, are known not to be the user's. They are skipped: Python
            makes an object of each frame that is looked at, which takes as long as the rest of this search.
    """
    if _override.line:
        return _override.line
    try:
        frame = sys._getframe(1 + ours)
    except ValueError:  # C code has called the outermost of these functions
        frame = sys._getframe(1)
    code = frame.f_code
    while _users.get(code.co_filename) is False and (outer := frame.f_back) is not None:
        frame, code = outer, outer.f_code
    known = _lines.get((id(code), frame.f_lasti))
    if known is not None and known[0] is code:  # the usual case: a line of the user's that was found before
        return known[1]
    return _line(_users_frame(frame))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line of the user's code that led to this call, however many functions of libraries lie between.
    If there is none, because a framework's thread runs this, it stands at the line that calls this function."""
    own = sys._getframe(1)
    found = _users_frame(own)
    frame = found if found is not None and is_users(found.f_code.co_filename) else own
    known = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<unknown>"  # for None nothing is issued
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, known)


def raised_at(error: BaseException) -> str:
    """``file:line`` of the innermost line of the user's code that an exception has passed."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
