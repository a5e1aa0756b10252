"""The errors of the operations: those of every binding and those of MXNet at the same time. Scripts catch either.

An operation in MXNet's engine hands its error on as a text. MXNet makes an exception of it where the script waits for the
array, of the class that is registered for the first word of the text. :func:`text_of` writes that word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mxnet.base import MXNetError, register_error

from horovod.core import errors

_INDENTED = "\n\N{NO-BREAK SPACE}"
"""How the beginning of an indented line travels: MXNet takes such lines for a stack trace, and moves them."""


class _Named:
    """An error whose text may be as :func:`text_of` wrote it, and MXNet passed it on."""

    def __init__(self, message: str) -> None:
        text = message.removeprefix(f"{type(self).__name__}: ").replace(_INDENTED, "\n ")
        super().__init__(text)  # type: ignore[call-arg]  # the next class takes it


class HorovodInternalError(_Named, MXNetError, errors.HorovodInternalError):  # type: ignore[misc]  # untyped base
    """A collective failed: ranks disagree, a rank failed or left, or Horovod does not run."""


class HorovodArgumentError(_Named, MXNetError, ValueError):  # type: ignore[misc]  # untyped base
    """A wrong argument, or a name that is in flight already."""


for _kind in (HorovodInternalError, HorovodArgumentError):
    register_error(_kind)


def both_kinds(error: BaseException) -> BaseException:
    """An error of the core as one that is MXNet's as well."""
    made = error
    if isinstance(error, MXNetError):
        pass
    elif isinstance(error, errors.HorovodInternalError):
        made = HorovodInternalError(str(error))
    elif isinstance(error, ValueError):
        made = HorovodArgumentError(str(error))
    return made


def text_of(error: BaseException) -> str:
    """What MXNet makes the same error of again."""
    error = both_kinds(error)
    return f"{type(error).__name__}: {error}".replace("\n ", _INDENTED)


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """A block whose errors become MXNet's as well."""
    try:
        yield
    except (errors.HorovodInternalError, ValueError) as error:
        raise both_kinds(error) from None
