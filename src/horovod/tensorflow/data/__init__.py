"""Data for TensorFlow's ranks: :func:`shard` deals a ``tf.data.Dataset``, ``compute_service`` has others prepare it."""

from __future__ import annotations

from horovod._models.evaluation import evaluate
from horovod.common.sharding.shard import shard, steps_per_epoch

__all__ = ["evaluate", "shard", "steps_per_epoch"]
