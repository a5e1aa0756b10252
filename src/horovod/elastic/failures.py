"""Turns a framework's errors of failed collectives back into Horovod's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.core import errors
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context

Kinds = tuple[type[BaseException], ...]

_Result = TypeVar("_Result")

_KINDS = {kind.__name__: kind for kind in errors.KINDS}
_NAMED = re.compile(rf"\b({'|'.join(_KINDS)}): (.*)")
"""How a framework's text names an error of a collective, and begins its own text."""


def is_failed_collective(error: BaseException, cancelled: Kinds = ()) -> bool:
    """Whether a collective has caused an error of a framework's runtime.

    A graph reports an exception of Python code as its own error, with the text of the exception. If several collectives of a
    graph fail together, it may report another operation that was ``cancelled``; then the job has failed as well. An error of
    the script stays an error of the script even if another rank has ended meanwhile: that rank most likely had the same error
    first.
    """
    if any(name in str(error) for name in _KINDS):
        return True
    return isinstance(error, cancelled) and context.is_initialized() and context.current().stopped is not None


def converting(func: Callable[..., _Result], kinds: Kinds, cancelled: Kinds = ()) -> Callable[..., _Result]:
    """Wraps ``func`` to raise HorovodInternalError if a framework reports a failed collective as one of ``kinds``.

    Args:
        cancelled: the kinds among ``kinds`` by which an operation reports that it did not run because another one failed.
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
            raise _collective_error(error) from error

    return wrapper


def _collective_error(error: BaseException) -> HorovodInternalError:
    """The error of the collective: the one that this process has raised, or one of its kind with the text that the framework
    has kept; where an operation was only cancelled, why the job has ended."""
    made = errors.recall(str(error))
    if made is not None:
        return made
    found = _NAMED.search(str(error))
    if found and found[2]:
        return _KINDS[found[1]](found[2])
    stopped = context.current().stopped if context.is_initialized() else None
    return HorovodInternalError(str(error)) if stopped is None else stopped.again()
