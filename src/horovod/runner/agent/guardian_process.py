"""The guardian itself: waits for the launcher's last word, and ends the job if it does not come.

Runs in a bare interpreter, without site packages, and must start fast: only the smallest parts of the standard library
are imported here.
"""

from __future__ import annotations

import os
import signal
import time

from horovod.runner.agent import process_tree

_LATE_SECONDS = 0.3


def watch() -> None:
    """Listen on standard input until the launcher says that it is done, or is gone. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends everything must not end the guardian first
    mark = b""
    sessions: set[int] = set()
    rest = b""
    while data := os.read(0, 4096):
        *words, rest = (rest + data).split(b"\n")
        for word in words:
            if word == b"done":
                os._exit(0)
            if word.startswith(b"mark "):
                mark = word[5:]
            elif word.startswith(b"+"):
                sessions.add(int(word[1:]))
            elif word.startswith(b"-"):
                sessions.discard(int(word[1:]))
    left = process_tree.end(lambda: process_tree.members(sessions, mark))
    # A rank that was just being started when the launcher died carries the mark a moment later.
    time.sleep(_LATE_SECONDS)
    left |= process_tree.end(lambda: process_tree.members(sessions, mark))
    os._exit(1 if left else 0)
