"""Keeps what Horovod logs and warns of in a block, for tests of what a training loop is warned of."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

from horovod.observe.call_site import is_users


class LogMessages(logging.Handler):
    """A block; its value is the list of what is said in it, the log and the warnings."""

    def __enter__(self) -> list[str]:
        self.kept: list[str] = []
        logging.getLogger("horovod").addHandler(self)
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        self._show, warnings.showwarning = warnings.showwarning, self._warned
        return self.kept

    def _warned(self, message: Warning | str, category: Any, filename: str, *others: Any) -> None:
        if "/horovod/" in filename or is_users(filename):  # not of another package
            self.kept.append(str(message))

    def __exit__(self, *args: object) -> None:
        warnings.showwarning = self._show
        self._caught.__exit__(None, None, None)
        logging.getLogger("horovod").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.kept.append(record.getMessage())


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of a function that contains ``text``."""
    source, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(source) if text in line)
