"""Divides a data set among the ranks so that all make the same number of steps.

Scripts call it as ``horovod.tensorflow.data`` and ``horovod.keras.data``. Nothing is communicated: every rank
knows the number of samples.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from horovod._bindings.sharding.sharded_arrays import shard_arrays
from horovod._bindings.sharding.shares import KINDS, Uneven, rank_and_size, share, steps
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | int = False,
    seed: int | None = None,
    uneven: Uneven = "drop",
    drop_remainder: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's part of a data set: rank r of ``size`` ranks gets every ``size``-th sample, from the r-th. Every rank must
    pass the same data.

    The part is taken before data are shuffled or batched, so each sample is on one rank. Unless ``uneven`` is "keep", all ranks
    make the same number of steps, with batches of the same sizes. Nothing is communicated.

    Args:
        data: a ``tf.data.Dataset`` of single samples, of known length and in the same order on every rank. Or arrays of equal
            length (of NumPy or what NumPy can read), alone or in tuples, lists and dicts.
        batch_size: the number of samples of one rank in one step. None: samples are not batched, for a custom ``map`` and
            ``batch``. Not allowed with arrays, because ``fit`` makes batches of these.
        shuffle: True: a new order in every epoch, with a buffer of all samples of this rank. A number: with a buffer of this
            size. Not allowed with arrays, because ``fit`` shuffles these.
        seed: the seed of the order. Each rank adds its rank. None: ``tf.random.set_seed`` determines it.
        uneven: for a number of samples that is not a multiple of ``size``. "drop": leave out the remaining samples at the end.
            "repeat": use the first samples twice, so that none is left out. "keep": use every sample once. Some ranks then
            have one sample more, and may make one step more. This is for evaluation, or for loops that end with ``join()``.
        drop_remainder: leave out a last batch that is smaller than the others. This is the same on all ranks.
        process_set: the ranks that share the samples. This rank must be a member.

    Returns:
        A ``tf.data.Dataset``, batched and prefetched if ``batch_size`` was given. Or NumPy arrays in the structure of
        ``data``, views where that is possible.

    Raises:
        ValueError: not initialised; a data set without an end, of unknown size, too small, or shuffled in an order that differs
            from rank to rank; arrays of different lengths; an argument that does not fit.
    """
    rank, size = rank_and_size(process_set)
    _check_uneven(uneven)
    if batch_size is not None:
        _check_positive("batch_size", batch_size)
    elif drop_remainder:
        raise ValueError("drop_remainder=True needs a batch_size")
    if shuffle is not False and shuffle is not True:
        _check_positive("shuffle", shuffle)
    if _is_dataset(data):
        from horovod._bindings.sharding.datasets import shard_dataset

        return shard_dataset(data, rank, size, batch_size, shuffle, seed, uneven, drop_remainder)
    if batch_size is not None or shuffle is not False or seed is not None:
        raise ValueError(
            "arrays are divided without shuffling or batching: leave out batch_size, shuffle and seed, and let "
            "fit(x, y, batch_size=..., shuffle=True) make batches; or pass a tf.data.Dataset"
        )
    return shard_arrays(data, rank, size, uneven)


def steps_per_epoch(
    samples: int,
    batch_size: int,
    *,
    uneven: Uneven = "drop",
    drop_remainder: bool = False,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The number of this rank's steps if all ranks together have ``samples`` samples.

    That is the length of what :func:`shard` returns.

    This is for data sets of unknown length, such as those that ``repeat()`` without an end, and for learning-rate schedules.

    Args:
        samples: the number of samples of all ranks together.
        batch_size: the number of samples of one rank in one step.
        uneven, drop_remainder, process_set: as for :func:`shard`.

    Raises:
        ValueError: not initialised, or the number of steps is 0.
    """
    rank, size = rank_and_size(process_set)
    _check_uneven(uneven)
    _check_positive("batch_size", batch_size)
    return steps(share(samples, rank, size, uneven), batch_size, drop_remainder)


def _is_dataset(data: Any) -> bool:
    """Whether ``data`` is a data set of TensorFlow. Does not import TensorFlow."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(data, tensorflow.data.Dataset)


def _check_uneven(uneven: str) -> None:
    if uneven not in KINDS:
        raise ValueError(f"uneven={uneven!r}: expected one of {', '.join(map(repr, KINDS))}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
