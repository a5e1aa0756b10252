"""What one generation leaves in a process does not decide what it sends in the next: a rank that has just arrived has nothing
of it. Gradients that are added up over several passes, and functions that were traced."""

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


class Models:
    """Two models with optimizers, and two with tapes, each trained by a function of its own. The two are of one kind."""

    def __init__(self) -> None:
        import horovod.tensorflow.keras as keras_hvd

        self.variables = [tf.Variable([0.0]) for _ in range(4)]
        self.optimizers = [keras_hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0)) for _ in range(2)]
        self.steps = [tf.function(self.by_optimizer(number), autograph=False) for number in range(2)]
        self.steps += [tf.function(self.by_tape(number), autograph=False) for number in range(2, 4)]

    def by_optimizer(self, number: int) -> Any:
        def step(gradient: Any) -> None:
            self.optimizers[number].apply_gradients([(gradient, self.variables[number])])

        return step

    def by_tape(self, number: int) -> Any:
        def step(gradient: Any) -> None:
            variable = self.variables[number]
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable * gradient)
            variable.assign_sub(tape.gradient(loss, variable))

        return step

    def train(self, order: list[int]) -> None:
        hvd.broadcast_variables(self.variables, root_rank=0)
        for _ in range(3):
            for number in order:
                self.steps[number](tf.constant([10.0**number * (1 + hvd.rank())]))


def traced() -> None:
    import builtins

    models = Models()
    hvd.broadcast_variables(models.variables[:2], root_rank=0)
    models.train([0, 1, 2, 3])
    for variable in models.variables:
        variable.assign([0.0])
    setattr(builtins, KEPT, models)


def traced_by_others() -> Any:
    """What the models come to, and the collectives of this rank, if they train in another order."""
    import builtins

    from horovod.core.lifecycle.context import running

    models = vars(builtins).pop(KEPT, None) or Models()
    models.train([3, 1, 0, 2])
    hvd.allreduce(0.0, name="end")
    recorder = running().workers[0].recorder
    assert recorder is not None
    names = [f"{each.request.operation.name} {each.request.name}" for each in recorder.ring]
    return [float(each[0]) for each in models.variables], names


def test_functions_of_an_earlier_generation_send_what_a_rank_sends_that_traces_them(job: Any) -> None:
    """The models train in another order than before, so the ranks that trained before name and number them anew."""
    env = {"HOROVOD_FLIGHT_RECORDER_SIZE": "10000", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
    job(2, traced, env=env)
    results = job(3, traced_by_others, env=env)
    values, names = results[0]
    assert results == [results[0]] * 3
    assert values == [-3 * 2.0 * 10.0**number for number in range(4)]
    assert len(names) > 12


def test_the_first_pass_of_a_generation_begins_a_sum_on_all_ranks(job: Any) -> None:
    job(2, first)
    for rank, (eager, traced, session) in enumerate(job(3, second)):
        assert eager == traced == [rank + 1.0, 12.0, rank + 1.0, 12.0]
        assert session == [0.0, -12.0, 0.0, -12.0]
