"""Failed collectives that a framework reports as errors of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context

Kinds = tuple[type[BaseException], ...]

_Result = TypeVar("_Result")

_NAME = HorovodInternalError.__name__


def is_failed_collective(error: BaseException, cancelled: Kinds = ()) -> bool:
    """Whether an error of a framework's runtime came of a collective.

    A graph reports what Python code raised in it as an error of its own, with the text. Where several collectives of a
    graph fail together, it may report another operation that was ``cancelled``; then the job has failed as well. An error
    of the script stays one even if another rank has ended meanwhile: that rank most likely met the same error first.
    """
    if _NAME in str(error):
        return True
    return isinstance(error, cancelled) and context.is_initialized() and context.current().stopped is not None


def converting(func: Callable[..., _Result], kinds: Kinds, cancelled: Kinds = ()) -> Callable[..., _Result]:
    """``func``, raising HorovodInternalError where a framework reports a failed collective as one of ``kinds``.

    Args:
        cancelled: those among ``kinds`` that an operation reports which did not run because another one failed.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> _Result:
        try:
            return func(*args, **kwargs)
        except HorovodInternalError:
            raise  # some are of a framework's kind as well
        except kinds as error:
            if not is_failed_collective(error, cancelled):
                raise
            raise HorovodInternalError(_text(error)) from error

    return wrapper


def _text(error: BaseException) -> str:
    """What failed: the text that the framework has kept, or why the job has ended where an operation was cancelled."""
    _, found, text = str(error).partition(f"{_NAME}: ")
    if found and text:
        return text.splitlines()[0]
    stopped = context.current().stopped if context.is_initialized() else None
    return str(error) if stopped is None else str(stopped)
