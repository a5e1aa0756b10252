"""TensorFlow's decorators with the types that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.eager.record import could_possibly_record

_F = TypeVar("_F", bound=Callable[..., Any])


def unconverted(function: _F) -> _F:
    """Keep AutoGraph from rewriting a function, and what it calls, when it is called inside ``tf.function``.

    The function itself is marked and returned. TensorFlow's ``do_not_convert`` returns another function, which has neither
    the defaults nor the code that scripts read and set.
    """
    autograph_artifact(function)
    return function


def with_gradient(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Of a function that returns its outputs and a function of their gradients, make one that TensorFlow differentiates so.

    Gradients that TensorFlow passes as ``tf.IndexedSlices``, as that of ``tf.gather``, are dense when the function gets them.
    """

    def with_dense_gradients(*tensors: Any) -> Any:
        outputs, gradient = function(*tensors)
        return outputs, lambda *grads: gradient(*map(_dense, grads))

    def differentiable(*tensors: Any) -> Any:
        recorded = could_possibly_record() or not tf.executing_eagerly()
        # Recording by TensorFlow takes longer than a small collective, so it is left out if no tape listens.
        return tf.custom_gradient(with_dense_gradients)(*tensors) if recorded else function(*tensors)[0]

    return differentiable


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
