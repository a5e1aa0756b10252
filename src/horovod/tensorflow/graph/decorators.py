"""TensorFlow's decorators with the types that it leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

_F = TypeVar("_F", bound=Callable[..., Any])


def unconverted(function: _F) -> _F:
    """Keep AutoGraph from rewriting a function, and what it calls, when it is called inside ``tf.function``."""
    return cast(_F, functools.wraps(function)(tf.autograph.experimental.do_not_convert(function)))


def with_gradient(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Of a function that returns its outputs and a function of their gradients, make one that TensorFlow differentiates so."""

    def differentiable(*tensors: Any) -> Any:
        recorded = could_possibly_record() or not tf.executing_eagerly()
        # What TensorFlow does to record takes longer than a small collective, so it is left out where nobody listens.
        return tf.custom_gradient(function)(*tensors) if recorded else function(*tensors)[0]

    return differentiable
