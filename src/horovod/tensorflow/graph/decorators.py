"""Typed decorators of TensorFlow: one turns off AutoGraph, the other sets a custom gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.eager.record import could_possibly_record

_F = TypeVar("_F", bound=Callable[..., Any])


def unconverted(function: _F) -> _F:
    """Keep AutoGraph from rewriting a function, and the functions that it calls, inside ``tf.function``.

    Marks and returns the function itself. TensorFlow's ``do_not_convert`` returns another function, which has neither
    the defaults nor the code that scripts read and set.
    """
    autograph_artifact(function)
    return function


def with_gradient(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Make a differentiable function of one that returns its outputs and its gradient function.

    All tensors that ``function`` uses must be its arguments. In graphs of TensorFlow 1, one that it uses otherwise is an error
    if it depends on a variable.

    The gradient function takes the gradients of the outputs, and returns the gradients of the arguments. It always gets dense
    tensors: ``tf.IndexedSlices``, which for example ``tf.gather`` passes back, are made dense first.
    """

    def with_dense_gradients(*tensors: Any) -> Any:
        outputs, gradient = function(*tensors)
        return outputs, lambda *grads: gradient(*map(_dense, grads))

    def differentiable(*tensors: Any) -> Any:
        recorded = could_possibly_record() or not tf.executing_eagerly()
        # Recording by TensorFlow takes longer than a small collective, so it is left out if no tape records.
        return tf.custom_gradient(with_dense_gradients)(*tensors) if recorded else function(*tensors)[0]

    return differentiable


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
