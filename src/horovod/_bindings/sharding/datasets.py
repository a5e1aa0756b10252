"""One rank's part of a ``tf.data.Dataset``; :func:`horovod._bindings.sharding.shard.shard` has checked the arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._bindings.sharding.shares import Uneven, share, steps

_LARGEST_SEED = 1 << 30


def shard_dataset(
    dataset: Any,
    rank: int,
    size: int,
    batch_size: int | None,
    shuffle: bool | int,
    seed: int | None,
    uneven: Uneven,
    drop_remainder: bool,
) -> Any:
    """Take this rank's samples, then shuffle, then make batches. See :func:`horovod._bindings.sharding.shard.shard`.

    Raises:
        ValueError: the data set has no end, its size is not known, it is too small, or its order differs from rank to rank.
    """
    if not tf.executing_eagerly():
        raise ValueError("shard() must be called outside of tf.function, where it can count the samples")
    _check_order(dataset)
    mine = _share(dataset, rank, size, uneven)
    if uneven == "repeat":
        dataset = dataset.repeat()
    dataset = dataset.shard(size, rank)
    if uneven != "keep":
        assert mine is not None
        dataset = dataset.take(mine)
    if shuffle is not False:
        if mine is None and shuffle is True:
            raise ValueError(
                "shuffle=True needs the number of samples, which is not known; pass the size of the shuffle buffer: "
                "shuffle=10_000"
            )
        dataset = dataset.shuffle(mine if shuffle is True else shuffle, seed=_seed(seed, rank))
    if batch_size is not None:
        if mine is not None:
            steps(mine, batch_size, drop_remainder)
        dataset = dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(tf.data.AUTOTUNE)
    return dataset


def _share(dataset: Any, rank: int, size: int, uneven: Uneven) -> int | None:
    """The number of this rank's samples. None if it is not known and not needed."""
    samples = int(dataset.cardinality())
    if samples == tf.data.INFINITE_CARDINALITY:
        raise ValueError("the data set is infinite: call shard() first, and repeat() on its result")
    if samples != tf.data.UNKNOWN_CARDINALITY:
        return share(samples, rank, size, uneven)
    if uneven == "keep":
        return None
    raise ValueError(
        "the number of samples is not known, as after filter(), interleave() or from_generator(), so the ranks cannot be "
        "given equal parts. If you know it: dataset.apply(tf.data.experimental.assert_cardinality(samples)). For files, shard "
        "the list of files instead, and repeat(); see docs/data.md"
    )


def _seed(seed: int | None, rank: int) -> int:
    """A different seed for each rank. With the same seed, neighbouring samples would always be in the same step.

    If ``seed`` is None, TensorFlow draws it, so ``tf.random.set_seed`` determines it.
    """
    if seed is None:
        seed = int(tf.random.uniform([], 0, _LARGEST_SEED, tf.int64))
    return seed + rank


def _check_order(dataset: Any) -> None:
    """Refuse a data set that is shuffled without a seed. Its order differs between ranks, so ranks would share samples.

    TensorFlow has no public way to find this out. If its classes change, such a data set is not recognised.
    """
    waiting = [dataset]
    while waiting:
        found = waiting.pop()
        if type(found).__name__ == "_ShuffleDataset":
            seeds = [getattr(found, name, None) for name in ("_seed", "_seed2")]
            if all(seed is not None and int(seed) == 0 for seed in seeds):
                raise ValueError(
                    "the data set is shuffled before it is sharded, in a different order on every rank, so some samples would "
                    "be on several ranks, and others on none. Shard first: shard(dataset, shuffle=True); and for files: "
                    "tf.data.Dataset.list_files(pattern, shuffle=False)"
                )
        waiting.extend(found._inputs() if hasattr(found, "_inputs") else ())
