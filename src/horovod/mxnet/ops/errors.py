"""The errors of the operations. Each is both an error of MXNet and an error of all bindings, so scripts can catch either.

An operation in MXNet's engine can only report the text of an error. When the script waits for the array, MXNet raises an
exception of the class that is registered for the first word of the text. :func:`text_of` writes this word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mxnet.base import MXNetError, register_error

from horovod.core import errors

_INDENTED = "\n\N{NO-BREAK SPACE}"
"""Replaces the beginning of an indented line. MXNet would treat such a line as part of a stack trace and move it."""


class _Named:
    """An error whose text may come from :func:`text_of` through MXNet."""

    def __init__(self, message: str) -> None:
        text = message.removeprefix(f"{type(self).__name__}: ").replace(_INDENTED, "\n ")
        super().__init__(text)  # type: ignore[call-arg]  # the next class is an exception
        known = errors.recall(text)
        if known is not None and isinstance(self, errors.HorovodInternalError):
            self.adopt(known)


class HorovodInternalError(_Named, MXNetError, errors.HorovodInternalError):  # type: ignore[misc]  # untyped base
    """A collective failed because ranks disagree, or because a rank failed or left; or Horovod is not initialised."""


class MismatchError(HorovodInternalError, errors.MismatchError):
    """The ranks do not agree."""


class RankLostError(HorovodInternalError, errors.RankLostError):
    """A rank was lost, or has left the job."""


class RankRaisedError(RankLostError, errors.RankRaisedError):
    """A rank's script ended with an exception."""


class CollectiveTimeoutError(HorovodInternalError, errors.CollectiveTimeoutError):
    """A rank has not taken part in a collective within a time limit."""


class EngineFailureError(HorovodInternalError, errors.EngineFailureError):
    """An engine, a device or the runtime failed on a rank."""


class HorovodArgumentError(_Named, MXNetError, ValueError):  # type: ignore[misc]  # untyped base
    """A wrong argument, or a name that is still in use."""


_OF_KIND: dict[type[errors.HorovodInternalError], type[HorovodInternalError]] = {
    errors.HorovodInternalError: HorovodInternalError,
    errors.MismatchError: MismatchError,
    errors.RankLostError: RankLostError,
    errors.RankRaisedError: RankRaisedError,
    errors.CollectiveTimeoutError: CollectiveTimeoutError,
    errors.EngineFailureError: EngineFailureError,
}

for _kind in (*_OF_KIND.values(), HorovodArgumentError):
    register_error(_kind)


def both_kinds(error: BaseException) -> BaseException:
    """Convert an error of the core to one of this module."""
    made = error
    if isinstance(error, MXNetError):
        pass
    elif isinstance(error, errors.HorovodInternalError):
        made = _OF_KIND.get(type(error), HorovodInternalError)(str(error))
        made.adopt(error)
    elif isinstance(error, ValueError):
        made = HorovodArgumentError(str(error))
    return made


def text_of(error: BaseException) -> str:
    """The text from which MXNet makes an error of the same class again."""
    error = both_kinds(error)
    return f"{type(error).__name__}: {error}".replace("\n ", _INDENTED)


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """A context that converts the errors raised in it to those of this module."""
    try:
        yield
    except (errors.HorovodInternalError, ValueError) as error:
        raise both_kinds(error) from None
