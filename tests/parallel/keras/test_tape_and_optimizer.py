"""Scripts of Keras 2 use DistributedGradientTape and DistributedOptimizer together; gradients are reduced once all the same."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import Job, make_job
from keras_ranks import tensorflow_pool


@pytest.fixture(scope="module", params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def job(ranks: Any, version: int) -> Job:
    return make_job(lambda size: tensorflow_pool(ranks, version), "horovod.tensorflow.keras")


def test_every_combination_reduces_once(job: Job, version: int) -> None:
    def check(version: int) -> None:
        import itertools

        import tensorflow as tf

        import horovod.tensorflow as hvd
        import horovod.tensorflow.keras as hvd_keras

        rank, keras = hvd.rank(), tf.keras  # gradients are 1 and 2: their sum is 3, their average 1.5
        once = {hvd.Sum: 3.0, hvd.Average: 1.5}

        def stepped(of_tape: Any, of_optimizer: Any, passes: int, graph: bool, local: str, change: Any) -> float:
            weight = tf.Variable([0.0])
            optimizer = hvd_keras.DistributedOptimizer(
                keras.optimizers.SGD(1.0), op=of_optimizer, backward_passes_per_step=passes
            )
            if local == "optimizer":
                optimizer.register_local_var(weight)

            def step() -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weight) * (rank + 1.0)
                tape = hvd.DistributedGradientTape(tape, op=of_tape)
                if local == "tape":
                    tape.register_local_source(weight)
                if version == 2:
                    optimizer.minimize(loss, [weight], tape=tape)
                    return
                (gradient,) = tape.gradient(loss, [weight])
                optimizer.apply_gradients([(change(gradient), weight)])

            optimizer.build([weight])
            step = tf.function(step) if graph else step
            for _ in range(passes):
                step()
            return float(-weight[0])

        for of_tape, of_optimizer, graph in itertools.product(once, once, (False, True)):
            where = (of_tape, of_optimizer, graph)
            assert stepped(*where[:2], 1, graph, "", lambda each: each) == once[of_tape], where
            assert stepped(*where[:2], 1, graph, "optimizer", lambda each: each) == once[of_tape], where
            assert stepped(*where[:2], 1, graph, "tape", lambda each: each) == (rank + 1) / 2, where
            if version == 3:
                assert stepped(*where[:2], 2, graph, "", lambda each: each) == 2 * once[of_tape], where
                for passes in (1, 2):
                    for change in (tf.identity, lambda each: each * 1.0):
                        assert stepped(*where[:2], passes, graph, "", change) == passes * once[of_tape], where

    job(2, check, version)


def test_a_plain_tape_and_one_over_other_ranks_are_reduced_by_the_optimizer(job: Job, version: int) -> None:
    def check(version: int) -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd
        import horovod.tensorflow.keras as hvd_keras

        if version == 2:
            return  # whose apply_gradients reduces nothing
        rank, weight = hvd.rank(), tf.Variable([0.0])
        alone = [hvd.add_process_set([each]) for each in range(2)][rank]

        def gradient(**options: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight) * (rank + 1.0)
            if options:
                tape = hvd.DistributedGradientTape(tape, **options)
            return tape.gradient(loss, [weight])[0]

        gradient(op=hvd.Sum)  # by an earlier part of the script
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum)
        adding = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        for _ in range(2):  # eagerly, as with run_eagerly=True
            adding.apply_gradients([(gradient(), weight)])
        assert weight.numpy() == [-3.0]
        for options in ({}, {"process_set": alone}, {}):
            weight.assign([0.0])
            optimizer.apply_gradients([(gradient(**options), weight)])
            assert weight.numpy() == [-3.0], options
        optimizer.apply_gradients([(gradient(op=hvd.Sum), weight)])
        optimizer.apply_gradients([(gradient(), weight)])
        assert weight.numpy() == [-9.0]

    job(2, check, version, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
