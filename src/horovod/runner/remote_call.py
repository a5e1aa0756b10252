"""The function and the results that ``horovod.run`` and its ranks exchange.

Both are stored at the job's rendezvous server, over authenticated connections only, so it is safe to use pickles here. A value
that is too large for one message is stored in parts.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod._base import pickling

REMOTE_CALL_KEY = "run/remote call"
_PART_BYTES = 64 << 20


def result_key(rank: int) -> str:
    return f"run/result/{rank}"


@dataclass(frozen=True)
class RemoteCall:
    """A function for every rank. The call is unpickled only after the rank's import path is set to the caller's."""

    import_path: tuple[str, ...]
    """The caller's ``sys.path``."""
    prefix: str
    """The caller's ``sys.prefix``, which identifies its Python installation."""
    call: bytes
    """The pickled function, positional arguments and keyword arguments."""

    @staticmethod
    def of(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> RemoteCall:
        """The call, as the calling process would make it.

        Raises:
            TypeError, pickle.PicklingError: the function or an argument cannot be sent.
        """
        path = tuple(entry or str(Path.cwd()) for entry in sys.path)
        return RemoteCall(path, sys.prefix, dumps((function, tuple(arguments), dict(keywords))))

    def run(self) -> Any:
        """Call the function, which may import everything that its caller could."""
        if self.prefix == sys.prefix:
            sys.path[:] = self.import_path
        else:  # another Python: its own packages come first
            sys.path += [entry for entry in self.import_path if entry not in sys.path]
        function, arguments, keywords = pickle.loads(self.call)
        return function(*arguments, **keywords)


@dataclass(frozen=True)
class Result:
    """The result of the function on one rank."""

    value: bytes = b""
    """The pickled return value."""
    error: bytes = b""
    """The pickled exception; b"" if there was none, or it could not be pickled."""
    traceback: str = ""
    """The exception as Python prints it; "" if there was none."""


def dumps(value: Any) -> bytes:
    return pickling.dumps(value)


def loads(data: bytes) -> Any:
    return pickle.loads(data)


def to_parts(key: str, data: bytes, size: int = _PART_BYTES) -> list[tuple[str, bytes]]:
    """Values to store, in this order: parts of at most ``size`` bytes, and under ``key`` their number, when all are there."""
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return [*((f"{key}/{index}", part) for index, part in enumerate(parts)), (key, str(len(parts)).encode())]


def from_parts(key: str, fetch: Callable[[str], bytes | None]) -> bytes | None:
    """The value stored under ``key``, or None if it is not there."""
    number = fetch(key)
    if number is None:
        return None
    parts = [fetch(f"{key}/{index}") for index in range(int(number))]
    return b"".join(part for part in parts if part is not None)
