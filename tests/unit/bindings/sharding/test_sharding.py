"""Every rank's part of a data set: disjoint, complete as far as promised, and of the promised length."""

from __future__ import annotations

import sys
from collections import namedtuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod._bindings.sharding import shard as sharding
from horovod._bindings.sharding.shard import shard, steps_per_epoch
from horovod._bindings.sharding.sharded_arrays import shard_arrays
from horovod._bindings.sharding.shares import KINDS, share, steps
from horovod.core.lifecycle.process_set import ProcessSet


def parts(samples: int, size: int, uneven: Any) -> list[list[int]]:
    return [shard_arrays(np.arange(samples), rank, size, uneven).tolist() for rank in range(size)]


@given(st.integers(1, 12), st.integers(0, 200))
def test_dropping_leaves_out_fewer_samples_than_there_are_ranks(size: int, more: int) -> None:
    samples = size + more
    dealt = parts(samples, size, "drop")
    assert {len(part) for part in dealt} == {samples // size}
    assert sorted(chain(*dealt)) == list(range(samples // size * size))


@given(st.integers(1, 12), st.integers(1, 200))
def test_repeating_brings_every_sample_and_the_first_ones_again(size: int, samples: int) -> None:
    dealt = parts(samples, size, "repeat")
    each = -(-samples // size)
    assert {len(part) for part in dealt} == {each}
    assert sorted(chain(*dealt)) == sorted(number % samples for number in range(each * size))


@given(st.integers(1, 12), st.integers(0, 200))
def test_keeping_brings_every_sample_once(size: int, more: int) -> None:
    samples = size + more
    dealt = parts(samples, size, "keep")
    assert sorted(chain(*dealt)) == list(range(samples))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(st.integers(1, 12), st.integers(1, 200), st.sampled_from(KINDS))
def test_the_share_is_the_length_of_the_part(size: int, samples: int, uneven: Any) -> None:
    for rank in range(size):
        if samples < size and uneven != "repeat":
            with pytest.raises(ValueError, match=f"{samples} samples are too few for {size} ranks"):
                share(samples, rank, size, uneven)
        else:
            part = shard_arrays(np.arange(samples), rank, size, uneven)
            assert share(samples, rank, size, uneven) == len(part)


def test_steps_count_the_last_batch_unless_it_is_left_out() -> None:
    assert steps(10, 4, False) == 3
    assert steps(10, 4, True) == 2
    assert steps(8, 4, False) == steps(8, 4, True) == 2
    assert steps(3, 4, False) == 1
    with pytest.raises(ValueError, match="3 samples are fewer than one batch of 4"):
        steps(3, 4, True)


def test_structures_stay_and_rows_stay_together() -> None:
    Pair = namedtuple("Pair", "x y")
    x, y = np.arange(20).reshape(10, 2), [float(number) for number in range(0, 20, 2)]
    mine = shard_arrays(Pair({"a": x, "b": None}, (np.array(y),)), 1, 3, "drop")
    assert type(mine) is Pair and type(mine.y) is tuple and mine.x["b"] is None
    assert mine.x["a"].tolist() == [[2, 3], [8, 9], [14, 15]]
    assert mine.y[0].tolist() == [2.0, 8.0, 14.0]


def test_parts_are_views_where_they_can_be() -> None:
    x = np.arange(12)
    assert np.shares_memory(shard_arrays(x, 1, 5, "drop"), x)
    assert np.shares_memory(shard_arrays(x, 1, 5, "keep"), x)
    assert np.shares_memory(shard_arrays(x, 1, 4, "repeat"), x)


def test_tensors_of_pytorch_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    assert shard_arrays((torch.arange(5), [torch.ones(5)]), 0, 2, "keep")[0].tolist() == [0, 2, 4]


def test_invalid_arguments_of_sharding_are_refused() -> None:
    for wrong, told in (
        ((np.ones((4, 2)), np.ones(5)), r"arrays of different lengths: \[0\]: \(4, 2\); \[1\]: \(5,\)"),
        ((), "neither a tf.data.Dataset nor arrays: tuple"),
        (None, "neither a tf.data.Dataset nor arrays: NoneType"),
        (iter([1]), "data is neither a tf.data.Dataset nor an array with rows: list_iterator"),
        ({"x": 3}, r"\['x'\] is neither"),
        (np.ones((0, 3)), "the data set is empty"),
    ):
        with pytest.raises(ValueError, match=told):
            shard_arrays(wrong, 0, 2, "drop")


def test_before_init_it_says_so() -> None:
    for call in (lambda: shard(np.ones(4)), lambda: steps_per_epoch(4, 2)):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
            call()


def test_a_set_that_is_not_registered_says_so() -> None:
    with pytest.raises(ValueError, match=r"is not registered; pass it to hvd\.init"):
        shard(np.ones(4), process_set=ProcessSet([0]))


@pytest.fixture
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "rank_and_size", lambda process_set: (2, 4))


@pytest.mark.usefixtures("third_of_four")
def test_arguments_that_do_not_fit() -> None:
    x: Any = np.arange(9)
    assert shard(x).tolist() == [2, 6]
    assert shard(x, uneven="keep").tolist() == [2, 6]
    assert shard(x, uneven="repeat").tolist() == [2, 6, 1]
    for wrong, told in (
        ({"uneven": "pad"}, "uneven='pad': expected one of 'drop', 'repeat', 'keep'"),
        ({"batch_size": 0}, "batch_size=0: expected a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: expected"),
        ({"batch_size": True}, "batch_size=True: expected"),
        ({"shuffle": 0}, "shuffle=0: expected"),
        ({"shuffle": -1}, "shuffle=-1: expected"),
        ({"drop_remainder": True}, "drop_remainder=True needs a batch_size"),
        ({"batch_size": 2}, "arrays are divided without shuffling or batching"),
        ({"shuffle": True}, "arrays are divided without shuffling or batching"),
        ({"seed": 1}, "arrays are divided without shuffling or batching"),
    ):
        with pytest.raises(ValueError, match=told):
            shard(x, **wrong)
    with pytest.raises(ValueError, match="uneven='pad': expected"):
        steps_per_epoch(9, 2, uneven="pad")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ValueError, match="batch_size=0"):
        steps_per_epoch(9, 0)
    assert steps_per_epoch(9, 2) == 1
    assert steps_per_epoch(9, 2, uneven="repeat") == 2
    assert steps_per_epoch(13, 2, uneven="keep") == 2
    assert steps_per_epoch(13, 2, uneven="repeat", drop_remainder=True) == 2


@pytest.mark.usefixtures("third_of_four")
def test_arrays_need_no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert shard(np.arange(9)).tolist() == [2, 6]
