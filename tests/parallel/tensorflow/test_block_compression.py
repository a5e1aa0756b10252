"""``hvd.Compression.int8`` in TensorFlow, between pretended hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from jobs import Job

LENGTH = 10_000


def values(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=LENGTH).astype(np.float32)


def test_allreduces_are_compressed_eagerly_and_in_graphs(job: Job) -> None:
    exact = values(0) + values(1)

    def one() -> list[Any]:
        own = tf.constant(values(hvd.rank()))

        def add(name: str) -> Any:
            return hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.int8, name=name)

        with pytest.raises(tf.errors.InvalidArgumentError, match="compresses sums"):
            hvd.allreduce(own, op=hvd.Max, compression=hvd.Compression.int8)
        with pytest.raises(tf.errors.InvalidArgumentError, match="is for allreduces and optimizers"):
            hvd.reducescatter(own, compression=hvd.Compression.int8)
        plain = hvd.allreduce(own, op=hvd.Sum).numpy()
        np.testing.assert_array_equal(plain, exact)
        grouped = hvd.grouped_allreduce([own, tf.ones(3)], op=hvd.Sum, compression=hvd.Compression.int8)
        return [add("eager").numpy(), tf.function(add)("graph").numpy(), grouped[0].numpy()]

    first, second = job(2, one, hosts="ab")
    for mine, theirs in zip(first, second, strict=True):
        assert 0 < np.abs(mine - exact).max() < 0.1
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(mine, first[0])


def test_a_tape_adds_what_was_rounded_away_to_the_next_gradient(job: Job) -> None:
    steps = 30
    exact = (values(0).astype(np.float64) + values(1)) / 2

    def one(compiled: bool) -> Any:
        variable, own = tf.Variable(tf.zeros(LENGTH)), tf.constant(values(hvd.rank()))

        def gradient() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int4) as tape:
                loss = tf.reduce_sum(variable * own)
            return tape.gradient(loss, [variable])[0]

        call = tf.function(gradient) if compiled else gradient
        return np.array([call().numpy() for _ in range(steps)])

    for compiled in (False, True):
        first, second = job(2, one, compiled, hosts="ab")
        np.testing.assert_array_equal(first, second)
        error = np.abs(first[0] - exact).max()
        assert 0 < np.abs(first.astype(np.float64).sum(axis=0) - steps * exact).max() < 5 * error


def test_the_setting_compresses_the_gradients_of_a_script_that_chooses_nothing(job: Job) -> None:
    def one() -> Any:
        variable, own = tf.Variable(tf.zeros(LENGTH)), tf.constant(values(hvd.rank()))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * own)
        return tape.gradient(loss, [variable])[0].numpy()

    first, second = job(2, one, hosts="ab", env={"HOROVOD_COMPRESSION": "int8"})
    np.testing.assert_array_equal(first, second)
    assert 0 < np.abs(first - (values(0) + values(1)) / 2).max() < 0.05
