"""Shows gradients to ``HOROVOD_DEBUG`` before they are reduced: at once in eager execution, or when a graph is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.comm.datatypes import Array
from horovod.tensorflow.graph.decorators import with_gradient


class StepWatch(NamedTuple):
    """Functions that look at each step of an optimizer or a tape.

    Attributes:
        begin: is called before anything is sent; in a graph, when it is run. It may raise.
        see: gets each gradient of this rank with its name, on any thread; None if gradients are not needed.
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
        # Without a state, so that gradients are looked at as they become ready, and in no order of their own.
        with tf.device("CPU:0"):
            found = tf.numpy_function(look, [tensor], tensor.dtype, stateful=False)
        found.set_shape(tensor.shape)
        return found, lambda upstream: upstream

    return passed(tensor)
