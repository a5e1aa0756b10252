"""The guardian process: reads what the launcher writes, and ends the job if the launcher dies.

It runs in a bare interpreter, without site packages, and must start fast. So it imports only small parts of the standard
library.
"""

from __future__ import annotations

import os
import signal
import time

from horovod.runner.agent import process_tree

_LATE_SECONDS = 0.3


def watch() -> None:
    """Read standard input until the launcher writes "done", or is gone. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to all processes must not end the guardian before the ranks
    mark = b""
    sessions: set[int] = set()
    rest = b""
    while data := os.read(0, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b"done":
                os._exit(0)
            if line.startswith(b"mark "):
                mark = line[5:]
            elif line.startswith(b"+"):
                sessions.add(int(line[1:]))
            elif line.startswith(b"-"):
                sessions.discard(int(line[1:]))
    left = process_tree.end(lambda: process_tree.members(sessions, mark))
    # A rank that the launcher was starting when it died has the mark in its environment only a moment later.
    time.sleep(_LATE_SECONDS)
    left |= process_tree.end(lambda: process_tree.members(sessions, mark))
    os._exit(1 if left else 0)
