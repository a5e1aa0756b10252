"""The errors of the operations. Each is an error of TensorFlow and also one that all bindings raise; scripts can catch either.

This holds for eager calls. In a graph, TensorFlow converts the errors of Python code: a ValueError or TypeError becomes an
InvalidArgumentError, everything else an UnknownError, with the text in its message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod.core import errors
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context


class _WithMessage:
    """Makes an error from a text alone, as Python does. TensorFlow's own errors also take the operation."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)  # type: ignore[call-arg]  # the next class is TensorFlow's
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class UnsupportedType(_WithMessage, tf.errors.InvalidArgumentError, TypeError):  # type: ignore[misc]  # untyped base
    """The elements are of a type that cannot be communicated."""


class InvalidArgument(_WithMessage, tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]  # untyped base
    """An argument is wrong. Nothing was sent."""


class PreconditionFailed(_WithMessage, tf.errors.FailedPreconditionError, HorovodInternalError):  # type: ignore[misc]  # as above
    """Horovod is not initialised, or an operation is not possible."""


class MismatchError(PreconditionFailed, errors.MismatchError):
    """The ranks do not agree."""


class TensorFlowInternalError(_WithMessage, tf.errors.UnknownError, HorovodInternalError):  # type: ignore[misc]  # untyped base
    """The job has failed, or Horovod was shut down."""


class RankLostError(TensorFlowInternalError, errors.RankLostError):
    """A rank was lost, or has left the job."""


class RankRaisedError(RankLostError, errors.RankRaisedError):
    """A rank's script ended with an exception."""


class CollectiveTimeoutError(TensorFlowInternalError, errors.CollectiveTimeoutError):
    """A rank has not done its part within a time limit."""


class EngineFailureError(TensorFlowInternalError, errors.EngineFailureError):
    """An engine, a device or the runtime failed on a rank."""


_OF_KIND: dict[type[HorovodInternalError], type[HorovodInternalError]] = {
    errors.MismatchError: MismatchError,
    errors.RankLostError: RankLostError,
    errors.RankRaisedError: RankRaisedError,
    errors.CollectiveTimeoutError: CollectiveTimeoutError,
    errors.EngineFailureError: EngineFailureError,
}


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """A context that converts HorovodInternalError and ValueError to the errors of this module."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        failed = context.is_initialized() and context.current().stopped is not None
        made = _OF_KIND.get(type(error), TensorFlowInternalError if failed else PreconditionFailed)(str(error))
        made.adopt(error)
        raise made from None
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
