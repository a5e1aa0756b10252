"""Passes gradients to functions of Python: eagerly at once, or when the graph runs.

Before the reduction these are the checks of ``HOROVOD_DEBUG``, and before gradients are applied those that compare the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.comm.datatypes import Array
from horovod.tensorflow.graph.callbacks import Callback
from horovod.tensorflow.graph.decorators import with_gradient
from horovod.tensorflow.training import in_graph


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


def looked_at(gradients: Sequence[Any], look: Callable[[Mapping[int, Any]], None]) -> list[Any]:
    """The gradients, which nothing uses before ``look`` has got the dense ones, by their positions, as eager tensors.

    It gets nothing where gradients are on a GPU, from which a graph would copy all of them, nor in a session of TensorFlow 1.
    """
    dense = [index for index, each in enumerate(gradients) if tf.is_tensor(each) and hasattr(each, "shape")]
    dense = [index for index in dense if not isinstance(gradients[index], tf.IndexedSlices)]
    found = list(gradients)
    if not dense or tf.config.list_logical_devices("GPU"):
        return found
    if tf.executing_eagerly():
        look({index: gradients[index] for index in dense})
        return found
    graph = tf.compat.v1.get_default_graph()
    if not graph.building_function:
        return found
    number = in_graph.number(lambda tensors: look(dict(zip(dense, tensors, strict=True))))
    with tf.device("CPU:0"):
        done = _LOOK.add(
            [tf.constant(number, tf.int64), *(gradients[index] for index in dense)], [tf.bool], "HorovodLook"
        )
    if graph.experimental_acd_manager is not None:
        graph.experimental_acd_manager.run_independently(done[0].op)  # in no order with the script's Python functions
    with tf.control_dependencies(done):
        for index in dense:
            found[index] = tf.identity(gradients[index])
    return found


def _look(number: Any, *tensors: Any) -> Any:
    in_graph.call(int(number), tensors)
    return tf.constant(True)


_LOOK = Callback("HorovodLook", _look)
