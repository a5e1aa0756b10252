"""Pickles objects for other ranks, including functions of the script with the names of their files.

Errors, stall reports and tracebacks name lines of the script. From 3.1.3 on, cloudpickle writes one name for the file of every
function that it sends by value.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import IO, Any, ClassVar

import cloudpickle


def _with_file(made: CodeType, file: str) -> CodeType:
    """Called where a code object is loaded."""
    return made.replace(co_filename=file)


class _Code:
    """Wraps a code object while it is pickled, and reduces it as cloudpickle does."""

    def __init__(self, code: CodeType) -> None:
        self.code = code


def _reduce_code(code: CodeType) -> Any:
    return _with_file, (_Code(code), code.co_filename)


def _reduce_as_before(held: _Code) -> Any:
    return cloudpickle.CloudPickler.dispatch_table[CodeType](held.code)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # untyped base
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code, _Code: _reduce_as_before}, cloudpickle.CloudPickler.dispatch_table
    )


def dump(value: Any, file: IO[bytes]) -> None:
    """Write ``value`` to a file. ``cloudpickle.load`` can read it if this package is installed."""
    _Pickler(file).dump(value)


def dumps(value: Any) -> bytes:
    """``value`` as bytes. ``cloudpickle.loads`` can read them if this package is installed."""
    buffer = io.BytesIO()
    dump(value, buffer)
    return buffer.getvalue()
