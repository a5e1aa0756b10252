"""HOROVOD_DEBUG finds usual mistakes of a training loop with a tape, and says where they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from log_messages import LogMessages, line_of

DEBUG = {"HOROVOD_DEBUG": "1", "HOROVOD_DEBUG_STEPS": "4"}
GRAPH = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def train(mistake: str, graph: bool, steps: int = 9) -> list[str]:
    """Train with one mistake, one variable being looked up sparsely; what this rank is told."""
    rank = hvd.rank()
    random = tf.random.Generator.from_seed(0 if mistake == "data" else rank)
    table = tf.Variable(tf.ones([8, 4]), name="table")
    kernel = tf.Variable(tf.ones([4, 2]), name="kernel")
    bias = tf.Variable([0.5, -0.5], name="bias")
    samples = tf.data.Dataset.range(64)
    if mistake == "order":
        samples = samples.shuffle(64, seed=rank)
    samples = samples.shard(hvd.size(), rank)

    def step(rows: Any, scale: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = tf.nn.embedding_lookup(table, rows) @ kernel + scale * bias
            loss = tf.reduce_sum(tf.square(outputs))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [table, kernel, bias])
        for variable, gradient in zip([table, kernel, bias], gradients, strict=True):
            variable.assign_sub(0.001 * tf.convert_to_tensor(gradient))

    run = tf.function(step) if graph else step
    with LogMessages() as messages:
        for number in range(steps):
            bad = mistake == "gradient" and rank == 1 and number == 5
            run(random.uniform([3], 0, 8, tf.int32), tf.constant(float("inf") if bad else 1.0))
            if mistake == "drift" and rank == 1 and number == 4:
                bias.assign_add([0.0, 1e-6])
    return messages


@GRAPH
@pytest.mark.parametrize("env", [DEBUG, {}], ids=["debug", "off"])
def test_a_right_loop_is_told_nothing(job: Any, graph: bool, env: dict[str, str]) -> None:
    assert job(2, train, "none", graph, env=env) == [[], []]


def test_without_it_nothing_is_looked_for(job: Any) -> None:
    assert job(2, train, "data", True) == [[], []]


@GRAPH
def test_a_gradient_that_is_not_finite_is_told_by_its_rank(job: Any, graph: bool) -> None:
    first, (told,) = job(2, train, "gradient", graph, 6, env=DEBUG)
    assert not first
    line = line_of(train, "tape.gradient(")
    found = re.match(
        r"rank 1: the gradient of '(table|kernel|bias)(:0)?' is not finite in step 6 of the gradients asked for at "
        rf"{re.escape(__file__)}:{line}: of \d+ elements (\d+) are NaN and (\d+) are infinite\. ",
        told,
    )
    assert found is not None and int(found[3]) + int(found[4]) > 0, told


@GRAPH
def test_variables_that_drift_apart_are_told_with_what_each_rank_has(job: Any, graph: bool) -> None:
    (told,), other = job(2, train, "drift", graph, 12, env=DEBUG)
    assert not other
    line = line_of(train, "tape.gradient(")
    assert re.search(
        rf"drifted apart after a step \(of the gradients asked for at {re.escape(__file__)}:{line}\): "
        r".*variable bias:0: [0-9a-f]{12} on rank 0, [0-9a-f]{12} on rank 1",
        told,
    ), told


@GRAPH
def test_equal_data_on_all_ranks_are_told_with_the_line_of_the_loop(job: Any, graph: bool) -> None:
    (told,), other = job(2, train, "data", graph, env=DEBUG)
    assert not other
    assert told.startswith(
        "ranks 0, 1 have computed the same gradients, bit for bit, in the first 3 steps of the gradients"
    )
    loop = line_of(train, "run(random") if graph else line_of(train, "tape.gradient(")
    assert (
        f"asked for at {__file__}:{line_of(train, 'tape.gradient(')}, when rank 0 was at {__file__}:{loop} in " in told
    )


def test_a_shuffle_with_different_seeds_before_the_shard_is_told(job: Any) -> None:
    (told,), other = job(2, train, "order", True, env=DEBUG)
    assert not other
    line = line_of(train, ".shard(")
    assert f"shuffle 1 before the shard at {__file__}:{line}: seeds " in told
    assert "on rank 0" in told and "on rank 1" in told and "samples come twice or not at all" in told


def test_as_an_error_all_ranks_raise_it(job: Any) -> None:
    def check(train: Any) -> str:
        with pytest.raises(Exception, match="drifted apart") as error:
            train("drift", True, 12)
        return str(error.value)

    told = job(2, check, train, env={**DEBUG, "HOROVOD_CHECK": "error"})
    assert all("variable bias:0" in each for each in told)
