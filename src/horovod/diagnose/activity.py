"""Describes what a rank's script does, from the call stack of its main thread. Pure."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import NamedTuple

from horovod.observe.dump import RankDump
from horovod.observe.threads import Frame, ThreadState

WAITS_FOR_COLLECTIVE = "waits for a collective"

_BY_FILE = (
    (r"/horovod/core/requests/handle\.py$", r"^wait$", WAITS_FOR_COLLECTIVE),
    (r"/horovod/core/worker/", r"", WAITS_FOR_COLLECTIVE),
    (r"/torch/utils/data/dataloader\.py$", r"_get_data", "waits for the worker processes of its DataLoader"),
    (r"/torch/utils/data/", r"", "loads data"),
    (r"/(?:pdb|bdb)\.py$", r"", "is in the debugger"),
    (r"/torch/serialization\.py$", r"save", "saves a file"),
    (r"/torch/serialization\.py$", r"load", "loads a file"),
    (r"/torch/(?:autograd|_tensor\.py)", r"backward", "is in the backward pass"),
    (r"/torch/optim/", r"step", "is in the optimizer's step"),
    (r"/tensorflow/python/data/", r"", "loads data"),
    (r"/subprocess\.py$", r"", "waits for another process"),
    (r"/multiprocessing/", r"", "waits for another process"),
    (r"/(?:ssl|socket|http/client|urllib/request)\.py$", r"", "waits for the network"),
    (r"/(?:queue|threading)\.py$", r"", "waits for another thread"),
    (r"/concurrent/futures/", r"", "waits for another thread"),
)
"""Descriptions by file and function of a call inside the user's line. The first that matches any call is used."""

_ENDS = r"/horovod/core/lifecycle/context\.py$"

_BY_CODE = (
    (r"(?<![\w.])input\(", "waits for input at the terminal (input())"),
    (r"\bbreakpoint\(", "is in the debugger"),
    (r"\bsleep\(", "sleeps"),
    (r"\.(?:save|dump|write|fsync|flush)\(|\bsave\w*\(", "writes a file"),
    (r"\.acquire\(|\bwith \w*lock\w*\b", "waits for a lock"),
    (r"\.join\(\)|\.result\(\)", "waits for another thread"),
    (r"\.backward\(", "is in the backward pass"),
    (r"\.read\(|\bopen\(|\bload\w*\(", "reads a file"),
)
"""Descriptions by the text of the innermost line, which may call native code."""


class Activity(NamedTuple):
    """A rank's activity: as text, and the line of the user's script."""

    does: str
    location: Frame | None

    def __str__(self) -> str:
        if self.location is None:
            return self.does
        code = f": {self.location.code}" if self.location.code else ""
        return f"{self.does}, at {self.location.file}:{self.location.line} in {self.location.function}{code}"


def activity(thread: ThreadState) -> Activity:
    """The activity of a thread."""
    location = thread.location
    innermost = thread.frames[0] if thread.frames else None
    if innermost is not None:
        for pattern, does in _BY_CODE:
            if innermost.users and re.search(pattern, innermost.code):
                return Activity(does, location)
    if any(re.search(_ENDS, frame.file) and frame.function == "shutdown" for frame in thread.frames):
        return Activity("ends (hvd.shutdown())", location)
    inside = list(takewhile(lambda frame: not frame.users, thread.frames))
    for file, function, does in _BY_FILE:
        if any(re.search(file, frame.file) and re.search(function, frame.function) for frame in inside):
            return Activity(does, location)
    if location is not None:
        for pattern, does in _BY_CODE:
            if re.search(pattern, location.code):
                return Activity(does, location)
    return Activity("runs", location)


def main_activity(dump: RankDump) -> Activity:
    """The activity of a rank's main thread."""
    if dump.exception:
        return Activity(f"ends: {dump.exception}", None)
    main = next((thread for thread in dump.threads if thread.main), None)
    return Activity("has no main thread any more", None) if main is None else activity(main)


def waits(dump: RankDump) -> bool:
    """Whether the rank's main thread waits for a collective."""
    return main_activity(dump).does == WAITS_FOR_COLLECTIVE


_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def main_thread_of(stacks: str) -> list[Frame]:
    """The calls of the main thread in what faulthandler has written: the last thread it names."""
    from horovod.observe.call_site import is_users

    blocks = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    return [
        Frame(found["file"], int(found["line"]), found["function"], "", is_users(found["file"]))
        for found in _FAULTHANDLER_FRAME.finditer(blocks[-1])
    ]
