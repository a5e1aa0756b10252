"""The format of log lines: ``[2026-01-31 12:00:00.000000: W worker.py:120] [3]: text``, with the level and time that are set.

TRACE to INFO go to standard output, the rest to standard error. An application that has set up the ``horovod`` logger itself
keeps its configuration. Source of the format and the variables: the public interface that existing scripts rely on.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime

_TRACE = 5
logging.addLevelName(_TRACE, "TRACE")

LEVELS = {
    "trace": _TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Formatter(logging.Formatter):
    def __init__(self, rank: int, hide_time: bool) -> None:
        super().__init__()
        self._rank = rank
        self._hide_time = hide_time

    def format(self, record: logging.LogRecord) -> str:
        time = "" if self._hide_time else f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S.%f}: "
        level = record.levelname[0].replace("C", "F")
        text = f"[{time}{level} {record.filename}:{record.lineno}] [{self._rank}]: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _Handler(logging.Handler):
    """Writes to the present ``sys.stdout`` and ``sys.stderr``, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def configure(rank: int, level: str, *, hide_time: bool) -> None:
    """Set up the ``horovod`` logger for this rank; called by each ``init()``.

    Args:
        level: a key of ``LEVELS``, in any letter case; anything else means "warning".
        hide_time: leave the time out of each line.
    """
    logger = logging.getLogger("horovod")
    ours = [handler for handler in logger.handlers if isinstance(handler, _Handler)]
    if logger.handlers and not ours:
        return
    handler = ours[0] if ours else _Handler()
    handler.setFormatter(_Formatter(rank, hide_time))
    if not ours:
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(LEVELS.get(level.lower(), logging.WARNING))
