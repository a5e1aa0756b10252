"""Gradients that are added up over several passes, where one rank has just arrived and the others are between two passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

v1 = tf.compat.v1
KEPT = "_horovod_test_kept"


class Passes:
    """Makes passes, and returns the sums after each."""

    def __init__(self, traced: bool) -> None:
        self.helper = LocalGradientAggregationHelper(
            2, lambda gradients, _: [hvd.allreduce(each, op=hvd.Sum, name=f"sum{traced}") for each in gradients]
        )
        self.variable = tf.Variable([0.0])
        self.make = tf.function(self.compute, autograph=False) if traced else self.compute

    def compute(self, gradient: Any) -> Any:
        return self.helper.compute_gradients([gradient], [self.variable])[0]

    def __call__(self) -> float:
        return float(self.make(tf.constant([hvd.rank() + 1.0]))[0])


class SessionPasses:
    """Makes passes in a session of TensorFlow 1, and returns the change of the variable in each."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variable = v1.get_variable("variable", initializer=tf.zeros([1]))
            self.factor = v1.placeholder(tf.float32, [1])
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum, backward_passes_per_step=2
            )
            self.step = optimizer.minimize(tf.reduce_sum(self.variable * self.factor))
            self.session = v1.Session(graph=self.graph)
            self.session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])

    def __call__(self) -> float:
        before = self.session.run(self.variable)
        self.session.run(self.step, {self.factor: np.array([hvd.rank() + 1.0], np.float32)})
        return float((self.session.run(self.variable) - before)[0])


def made() -> list[Any]:
    return [Passes(traced=False), Passes(traced=True), SessionPasses()]


def first() -> None:
    import builtins

    kept = made()
    for passes in kept:
        for _ in range(3):
            passes()
    setattr(builtins, KEPT, kept)


def second() -> Any:
    import builtins

    return [[passes() for _ in range(4)] for passes in vars(builtins).pop(KEPT, None) or made()]


def test_the_first_pass_of_a_generation_begins_a_sum_on_all_ranks(job: Any) -> None:
    job(2, first, timeout=60)
    for rank, (eager, traced, session) in enumerate(job(3, second, timeout=60)):
        assert eager == traced == [rank + 1.0, 12.0, rank + 1.0, 12.0]
        assert session == [0.0, -12.0, 0.0, -12.0]
