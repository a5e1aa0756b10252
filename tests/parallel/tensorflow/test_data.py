"""``hvd.data.shard`` on real ranks: all make the same steps, with gradients of disjoint samples; or join where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from jobs import Job


def samples(count: int) -> Any:
    x = np.arange(count, dtype=np.float32)
    return tf.data.Dataset.from_tensor_slices((x, 3 * x + 1))


def trained(mine: Any, epochs: int = 2) -> tuple[list[list[float]], list[float]]:
    """What this rank saw, step by step, and the two weights that it has in the end."""
    weights = [tf.Variable(0.0), tf.Variable(0.0)]
    seen: list[list[float]] = []

    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(weights[0] * x + weights[1] - y))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-3 * gradient)

    for _ in range(epochs):
        for x, y in mine:
            step(x, y)
            seen.append(x.numpy().tolist())
    return seen, [float(weight) for weight in weights]


@pytest.mark.parametrize(("uneven", "drop_remainder"), [("drop", False), ("drop", True), ("repeat", False)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_make_the_same_number_of_steps_on_different_samples(
    job: Job, size: int, uneven: Any, drop_remainder: bool
) -> None:
    def check() -> Any:
        options = {"uneven": uneven, "drop_remainder": drop_remainder}
        mine = hvd.data.shard(samples(17), 4, shuffle=True, seed=1, **options)
        assert len(mine) == hvd.data.steps_per_epoch(17, 4, **options)
        return len(mine), *trained(mine)

    results = job(size, check)
    lengths, seen, weights = zip(*results, strict=True)
    assert len(set(lengths)) == 1 and len({tuple(each) for each in weights}) == 1
    assert {len(steps) for steps in seen} == {2 * lengths[0]}
    for step in zip(*seen, strict=True):
        assert len({len(batch) for batch in step}) == 1, "batches of a step weigh the same"
    first = sorted(x for steps in seen for batch in steps[: lengths[0]] for x in batch)
    assert len(first) == sum(len(batch) for steps in seen for batch in steps) / 2
    if uneven == "repeat":
        assert first == sorted(number % 17 for number in range(len(first))) and len(first) >= 17
    else:
        assert len(set(first)) == len(first)
        assert drop_remainder or first == list(range(17 // size * size))


def test_a_loop_over_uneven_parts_ends_with_join(job: Job) -> None:
    def check() -> Any:
        mine = hvd.data.shard(samples(5), 1, uneven="keep")
        seen, weights = trained(mine, epochs=1)
        last = int(hvd.join())
        return len(seen), last, [float(hvd.broadcast(weight, last)) for weight in weights]

    results = job(3, check)
    assert [steps for steps, _, _ in results] == [2, 2, 1]
    assert len({last for _, last, _ in results}) == 1 and results[0][1] in (0, 1)
    assert results[0][2] == results[1][2] == results[2][2] != [0.0, 0.0]


def test_the_ranks_of_a_process_set_share_a_data_set(job: Job) -> None:
    def check(sets: list[Any]) -> Any:
        mine = next((each for each in sets if each.included()), None)
        if mine is None:
            with pytest.raises(ValueError, match=r"Process is not part of provided process set\. This is rank 1"):
                hvd.data.shard(np.arange(8), process_set=sets[0])
            return None
        parts = [hvd.data.shard(np.arange(8), process_set=mine), hvd.data.steps_per_epoch(9, 2, process_set=mine)]
        return [
            *parts,
            [each.numpy().tolist() for each in hvd.data.shard(tf.data.Dataset.range(8), 4, process_set=mine)],
        ]

    first, none, second = job(3, check, sets=[[0, 2]])
    assert none is None
    assert first[0].tolist() == [0, 2, 4, 6] and second[0].tolist() == [1, 3, 5, 7]
    assert first[1:] == [2, [[0, 2, 4, 6]]] and second[1:] == [2, [[1, 3, 5, 7]]]


def test_too_few_samples_fail_on_every_rank(job: Job) -> None:
    def check() -> str:
        with pytest.raises(ValueError, match="too few") as caught:
            hvd.data.shard(samples(2), 4)
        return str(caught.value)

    assert set(job(3, check)) == {
        '2 samples are too few for 3 ranks: some would have none. Start fewer ranks, or repeat samples with uneven="repeat"'
    }


def test_sharding_after_shutdown_is_an_error(job: Job) -> None:
    def check() -> None:
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
            hvd.data.shard(samples(8), 2)

    job(2, check)
