"""How collectives take part in a TensorFlow program: at once where it executes eagerly, as operations in a graph.

Graphs are the matter of :mod:`horovod.tensorflow.site`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod.core.handle import all_of
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.site import Leg, Site


def run(name: str, legs: Sequence[Leg]) -> list[list[Any]]:
    """Run some collectives, all submitted before any is waited for; the outputs, leg by leg.

    Args:
        name: of the operation in a graph, as :func:`horovod.tensorflow.names.node_name` gives it.

    Raises:
        as :mod:`horovod.tensorflow.errors` says, in eager execution; NotImplementedError in code compiled by XLA.
    """
    if tf.executing_eagerly():
        return _run_eagerly(legs)
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            f"{name}: XLA cannot compile Horovod's operations, which leave the device. Build the function without "
            "jit_compile=True (Keras: model.compile(..., jit_compile=False)), and compile only what it calls between them."
        )
    with tf.init_scope():
        in_functions = tf.executing_eagerly()
    with tf.device("CPU:0"):
        return Site(in_functions).build(name, legs)


def _run_eagerly(legs: Sequence[Leg]) -> list[list[Any]]:
    with of_both_kinds():
        under_way = [leg.start(leg.inputs, len(legs) == 1) for leg in legs]
        all_of(handle.wait for handle, _ in under_way)
        return [outputs() for _, outputs in under_way]
