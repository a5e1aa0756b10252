"""How collectives take part in a TensorFlow program: at once where it executes eagerly, as operations in a graph.

Graphs are the matter of :mod:`horovod.tensorflow.graph.operation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod.core.submission.handle import all_of
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.operation import GraphOperation, Submission


def run(name: str, submissions: Sequence[Submission]) -> list[list[Any]]:
    """Run some collectives, all submitted before any is waited for; the outputs, leg by leg.

    Args:
        name: of the operation in a graph, as :func:`horovod.tensorflow.graph.names.node_name` gives it.

    Raises:
        as :mod:`horovod.tensorflow.errors` says, in eager execution; NotImplementedError in code compiled by XLA.
    """
    if tf.executing_eagerly():
        return _run_eagerly(submissions)
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            f"{name}: XLA cannot compile Horovod's operations, which leave the device. Build the function without "
            "jit_compile=True (Keras: model.compile(..., jit_compile=False)), and compile only what it calls between them."
        )
    with tf.init_scope():
        in_functions = tf.executing_eagerly()
    with tf.device("CPU:0"):
        return GraphOperation(in_functions).build(name, submissions)


def _run_eagerly(submissions: Sequence[Submission]) -> list[list[Any]]:
    with of_both_kinds():
        under_way = [submission.start(submission.inputs, len(submissions) == 1) for submission in submissions]
        all_of(handle.wait for handle, _ in under_way)
        return [outputs() for _, outputs in under_way]
