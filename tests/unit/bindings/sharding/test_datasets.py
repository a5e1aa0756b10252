"""One rank's part of a ``tf.data.Dataset``: the same samples as of an array, in batches that all ranks make equally many of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from horovod._bindings.sharding.datasets import shard_dataset  # noqa: E402
from horovod._bindings.sharding.sharded_arrays import shard_arrays  # noqa: E402  TensorFlow may be missing
from horovod._bindings.sharding.shares import KINDS, share, steps  # noqa: E402


@pytest.fixture(autouse=True)
def without_a_seed() -> Iterator[None]:
    """TensorFlow has no public way to take back ``tf.random.set_seed``."""
    from tensorflow.python.eager import context

    before, context.context()._seed = context.context()._seed, None
    yield
    context.context()._seed = before


def dealt(
    dataset: Any,
    rank: int,
    size: int,
    batch_size: int | None = None,
    shuffle: bool | int = False,
    seed: int | None = None,
    uneven: Any = "drop",
    drop_remainder: bool = False,
) -> Any:
    return shard_dataset(dataset, rank, size, batch_size, shuffle, seed, uneven, drop_remainder)


def numbers(dataset: Any) -> list[Any]:
    return [np.asarray(each).tolist() for each in dataset]


@pytest.mark.parametrize("uneven", KINDS)
@pytest.mark.parametrize("samples", [4, 7, 8, 11])
def test_the_samples_are_those_of_an_array(samples: int, uneven: Any) -> None:
    for rank in range(4):
        mine = dealt(tf.data.Dataset.range(samples), rank, 4, uneven=uneven)
        assert numbers(mine) == shard_arrays(np.arange(samples), rank, 4, uneven).tolist()
        assert len(mine) == share(samples, rank, 4, uneven)
        shuffled = dealt(tf.data.Dataset.range(samples), rank, 4, 2, shuffle=True, uneven=uneven)
        assert sorted(chain(*numbers(shuffled))) == sorted(numbers(mine))


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("uneven", KINDS)
def test_the_length_is_the_number_of_steps(uneven: Any, drop_remainder: bool) -> None:
    lengths = set()
    for rank in range(3):
        mine = dealt(tf.data.Dataset.range(19), rank, 3, 4, uneven=uneven, drop_remainder=drop_remainder)
        batches = numbers(mine)
        assert len(mine) == len(batches) == steps(share(19, rank, 3, uneven), 4, drop_remainder)
        lengths.add(tuple(map(len, batches)))
    assert len(lengths) == (1 if uneven != "keep" or drop_remainder else 2)


def test_more_ranks_than_samples_repeat_all_of_them() -> None:
    assert [numbers(dealt(tf.data.Dataset.range(3), rank, 7, uneven="repeat")) for rank in range(7)] == [
        [rank % 3] for rank in range(7)
    ]


def test_every_epoch_has_another_order_and_every_rank_its_own() -> None:
    orders = {}
    for seed in (5, None):
        tf.random.set_seed(1)
        for rank in range(2):
            tf.random.set_seed(1)  # as a script does that gives all ranks one seed
            mine = dealt(tf.data.Dataset.range(100), rank, 2, shuffle=True, seed=seed)
            epochs = [[number // 2 for number in numbers(mine)] for _ in range(2)]
            assert epochs[0] != epochs[1] and sorted(epochs[0]) == list(range(50))
            orders[seed, rank] = epochs
            tf.random.set_seed(1)
            again = dealt(tf.data.Dataset.range(100), rank, 2, shuffle=True, seed=seed)
            assert [[number // 2 for number in numbers(again)] for _ in range(2)] == epochs, "a seed repeats it"
        assert orders[seed, 0] != orders[seed, 1]


def test_a_buffer_of_a_few_samples_mixes_only_those() -> None:
    order = numbers(dealt(tf.data.Dataset.range(1000), 0, 1, shuffle=10, seed=3))
    assert order != sorted(order) and sorted(order) == list(range(1000))
    assert all(number <= index + 10 for index, number in enumerate(order))


def test_structures_pass() -> None:
    data = tf.data.Dataset.from_tensor_slices(({"x": tf.range(8)}, tf.range(8) * 10))
    inputs, targets = next(iter(dealt(data, 1, 2, 3)))
    assert inputs["x"].numpy().tolist() == [1, 3, 5] and targets.numpy().tolist() == [10, 30, 50]


def test_what_cannot_be_counted_cannot_be_dealt_evenly() -> None:
    some = tf.data.Dataset.range(9).filter(lambda number: number != 4)
    for uneven in ("drop", "repeat"):
        with pytest.raises(ValueError, match=r"the number of samples is not known.*assert_cardinality"):
            dealt(some, 0, 2, 4, uneven=uneven)
    known = some.apply(tf.data.experimental.assert_cardinality(8))
    assert numbers(dealt(known, 1, 2, 3)) == [[1, 3, 6], [8]]
    assert numbers(dealt(some, 1, 2, 3, uneven="keep")) == [[1, 3, 6], [8]]
    with pytest.raises(ValueError, match="shuffle=10_000"):
        dealt(some, 0, 2, 4, shuffle=True, uneven="keep")
    assert sorted(chain(*numbers(dealt(some, 0, 2, 4, shuffle=3, uneven="keep")))) == [0, 2, 5, 7]


def test_what_is_too_small_or_too_large() -> None:
    for data, told in (
        (tf.data.Dataset.range(5).repeat(), r"is infinite: call shard\(\) first, and repeat\(\) on its result"),
        (tf.data.Dataset.range(0), "the data set is empty"),
        (tf.data.Dataset.range(3), "3 samples are too few for 4 ranks"),
    ):
        for rank in range(4):
            with pytest.raises(ValueError, match=told):
                dealt(data, rank, 4)
    with pytest.raises(ValueError, match="a rank's 2 samples are fewer than one batch of 3"):
        dealt(tf.data.Dataset.range(8), 0, 4, 3, drop_remainder=True)


def test_a_data_set_in_an_order_of_its_own_is_refused(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).touch()
    pattern = str(tmp_path / "*")
    for wrong in (
        tf.data.Dataset.range(8).shuffle(8),
        tf.data.Dataset.range(8).shuffle(8, reshuffle_each_iteration=False).map(lambda x: x + 1).prefetch(1),
        tf.data.Dataset.zip((tf.data.Dataset.range(8), tf.data.Dataset.range(8).shuffle(2))),
        tf.data.Dataset.list_files(pattern),
    ):
        with pytest.raises(ValueError, match="in a different order on every rank"):
            dealt(wrong, 0, 2)
    found = [numbers(dealt(tf.data.Dataset.list_files(pattern, shuffle=False), rank, 2)) for rank in range(2)]
    assert [[Path(each.decode()).name for each in part] for part in found] == [["a", "c"], ["b", "d"]]
    assert len(dealt(tf.data.Dataset.range(8).shuffle(8, seed=0), 0, 2)) == 4


def test_a_function_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"outside of tf\.function"):

        @tf.function
        def traced() -> Any:
            return dealt(tf.data.Dataset.range(8), 0, 2).reduce(np.int64(0), lambda a, b: a + b)

        traced()
