"""The errors of the operations: those of every binding and those of TensorFlow at the same time.

Scripts catch either. What an eager call raises is of both kinds. In a graph TensorFlow itself makes an error of what Python
code raised: InvalidArgumentError of a ValueError or TypeError, UnknownError of everything else, with the text in its message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context


class _WithMessage:
    """Made from its text alone, as errors of Python are; those of TensorFlow want the operation too."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)  # type: ignore[call-arg]  # the next class is TensorFlow's
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class UnsupportedType(_WithMessage, tf.errors.InvalidArgumentError, TypeError):  # type: ignore[misc]  # untyped base
    """Elements of a type that no collective moves."""


class InvalidArgument(_WithMessage, tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]  # untyped base
    """A wrong argument, found before anything was sent."""


class PreconditionFailed(_WithMessage, tf.errors.FailedPreconditionError, HorovodInternalError):  # type: ignore[misc]  # as above
    """The ranks do not agree, or Horovod does not run."""


class JobFailed(_WithMessage, tf.errors.UnknownError, HorovodInternalError):  # type: ignore[misc]  # untyped base
    """A rank failed or left, or Horovod was shut down."""


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """A block whose errors become TensorFlow's as well."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        failed = context.is_initialized() and context.current().stopped is not None
        raise (JobFailed if failed else PreconditionFailed)(str(error)) from None
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
