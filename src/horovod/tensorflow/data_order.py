"""With ``HOROVOD_DEBUG``, notes how ``tf.data`` datasets are shuffled before ``shard`` divides them among the ranks.

A shuffle before a shard must be the same on all ranks; otherwise the ranks use some samples twice and others not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from horovod.comparison.debugging import order
from horovod.core.lifecycle.context import running
from horovod.observe.call_site import caller

_MOST_NOTED = 16


@functools.cache
def follow_datasets() -> None:
    """Have ``tf.data.Dataset.shard`` note the shuffles before it, once per process. Its results do not change."""
    original = tf.data.Dataset.shard

    @functools.wraps(original)
    def shard(self: Any, num_shards: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        if order.wanted and len(order.held) < _MOST_NOTED and _is_number(num_shards) and num_shards > 1:
            line = caller()
            for number, shuffle in enumerate(_shuffles(self), 1):
                order.held[f"shuffle {number} before the shard at {line}"] = _describe(shuffle)
        return original(self, num_shards, index, *args, **kwargs)

    tf.data.Dataset.shard = shard


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shuffles(dataset: Any) -> Iterator[Any]:
    """The shuffles in a dataset's pipeline, the last one first. TensorFlow has no public interface for them."""
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        if all(hasattr(each, name) for name in ("_seed", "_seed2", "_buffer_size")):
            yield each
        waiting += getattr(each, "_inputs", list)()


def _describe(shuffle: Any) -> str:
    seeds = [tf.get_static_value(shuffle._seed), tf.get_static_value(shuffle._seed2)]
    if not any(seeds):  # then TensorFlow draws random seeds
        return f"no seed, so rank {running().identity.rank} shuffles in its own order"
    return f"seeds {seeds[0]} and {seeds[1]}"
