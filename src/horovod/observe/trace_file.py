"""A file of trace events as chrome://tracing and Perfetto read them, complete after every write.

The file is a JSON array. Each write begins by overwriting the closing bracket, so a job that is killed leaves a file that can
be read. A process can be killed in the middle of a write between two pages of the file; so a write holds a few events, and
crosses a page boundary only where one event does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import msgspec

Event = dict[str, Any]

PAGE_BYTES = 4096
LONGEST_EVENT = 200
"""The size of an event whose tensor has a name of usual length, in bytes."""


class TraceFile:
    """One file. Its methods are for one thread at a time.

    Args:
        path: an existing file is replaced.

    Raises:
        OSError: the file cannot be written; so do all methods.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 0

    def write(self, events: Sequence[Event]) -> None:
        text = b""
        for event in events:
            text += (b"[\n" if self._end == 0 and not text else b",\n") + _encoded(event)
            if (self._end + len(text) + LONGEST_EVENT) // PAGE_BYTES > self._end // PAGE_BYTES:
                self._append(text)
                text = b""
        if text:
            self._append(text)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, text: bytes) -> None:
        """Write events over the closing bracket, and a new closing bracket behind them."""
        os.pwrite(self._file, text + b"\n]\n", self._end)
        self._end += len(text)


_encoder = msgspec.json.Encoder()


def _encoded(event: Event) -> bytes:
    """In UTF-8. A step of a large model has thousands of events, and :mod:`json` takes ten times as long for each."""
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:  # a name that is no valid Unicode
        return json.dumps(event).encode()
