"""Passes gradients to the checks of ``HOROVOD_DEBUG`` before the reduction: eagerly at once, or when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.comm.datatypes import Array
from horovod.tensorflow.graph.decorators import with_gradient


class StepWatch(NamedTuple):
    """Functions that look at each step of an optimizer or a tape.

    Attributes:
        begin: called before anything is sent; in a graph, when the graph runs. It may raise.
        see: called with the name and the elements of each gradient of this rank, on any thread. None if nothing needs them.
    """

    begin: Callable[[], None]
    see: Callable[[str, Array], None] | None = None


def shown(gradient: Any, name: str, see: Callable[[str, Array], None]) -> Any:
    """The gradient, a tensor or ``tf.IndexedSlices``; ``see`` gets its values first. None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_shown(gradient.values, name, see), gradient.indices, gradient.dense_shape)
    return _shown(gradient, name, see)


def _shown(tensor: Any, name: str, see: Callable[[str, Array], None]) -> Any:
    if tf.executing_eagerly():
        see(name, tensor.numpy())
        return tensor

    def look(values: Array) -> Array:
        see(name, values)
        return values

    @with_gradient
    def passed(tensor: Any) -> Any:
        # Stateless, so that TensorFlow calls it as soon as a gradient is ready, and keeps no order among gradients.
        with tf.device("CPU:0"):
            found = tf.numpy_function(look, [tensor], tensor.dtype, stateful=False)
        found.set_shape(tensor.shape)
        return found, lambda upstream: upstream

    return passed(tensor)
