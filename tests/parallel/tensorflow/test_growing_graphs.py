"""A session looks at its whole graph again each time the graph has grown, so a collective must add little to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd

# An identity of each output and one of everything carry the gradient.
ONE = {"EagerPyFunc": 2, "While": 1, "Identity": 1, "IdentityN": 1}


def test_a_collective_adds_few_operations_and_no_function_to_a_session_s_graph(job: Any) -> None:
    def check() -> None:
        collectives: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
            "allgather": hvd.allgather,
            "broadcast": lambda x: hvd.broadcast(x, 0),
            "alltoall": hvd.alltoall,
            "reducescatter": hvd.reducescatter,
        }
        graph = tf.Graph()
        with graph.as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
            session.run(hvd.allreduce(x))
            functions = len(graph.as_graph_def().library.function)
            for name, collective in collectives.items():
                for _ in range(2):
                    before = len(graph.get_operations())
                    session.run(collective(x))
                    added = Counter(operation.type for operation in graph.get_operations()[before:])
                    outputs = 2 if name == "alltoall" else 1  # also how many rows came from each rank
                    assert added == {**ONE, "Identity": outputs}, (name, added)
            assert len(graph.as_graph_def().library.function) == functions

    job(2, check)


def test_gradients_of_a_model_add_three_operations_to_a_session_s_graph(job: Any) -> None:
    def check() -> None:
        graph = tf.Graph()
        with graph.as_default(), tf.compat.v1.Session() as session:
            variables = [tf.compat.v1.get_variable(f"v{i}", [2], use_resource=True) for i in range(20)]
            gradients = tf.gradients(tf.add_n([tf.reduce_sum(each**2) for each in variables]), variables)
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            plain.compute_gradients = lambda *_: list(zip(gradients, variables, strict=True))
            hvd.allreduce(variables[0])  # what all collectives of a graph share
            before = len(graph.get_operations())
            reduced = hvd.DistributedOptimizer(plain).compute_gradients(None)
            added = Counter(operation.type for operation in graph.get_operations()[before:])
            assert added.pop("IdentityN") == 1 and added.pop("Identity") == len(variables)  # of tf.custom_gradient
            assert added == {"EagerPyFunc": 2, "While": 1}, added
            session.run(tf.compat.v1.global_variables_initializer())
            session.run([gradient for gradient, _ in reduced])

    job(2, check)
