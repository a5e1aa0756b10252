"""Runs collectives: at once in eager execution, or as an operation of the graph that is being built.

:mod:`horovod.tensorflow.graph.operation` builds that operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod.core.requests.handle import all_of
from horovod.tensorflow.errors import of_both_kinds
from horovod.tensorflow.graph.operation import Submission, build


def run(name: str, submissions: Sequence[Submission]) -> list[list[Any]]:
    """Run one or several collectives. Submits all of them before it waits for the first.

    Args:
        name: the name of the operation in a graph: ``node`` of :func:`horovod.tensorflow.graph.names.collective_name`.
        submissions: the collectives, at least one.

    Returns:
        The outputs of each submission.

    Raises:
        tf.errors.OpError: in eager execution, one of the errors of :mod:`horovod.tensorflow.errors`.
        NotImplementedError: XLA compiles the code.
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
        return build(name, submissions, in_functions)


def _run_eagerly(submissions: Sequence[Submission]) -> list[list[Any]]:
    with of_both_kinds():
        in_flight = [
            submission.collective.start(submission.inputs, len(submissions) == 1) for submission in submissions
        ]
        all_of(handle.wait for handle, _ in in_flight)
        return [outputs() for _, outputs in in_flight]
