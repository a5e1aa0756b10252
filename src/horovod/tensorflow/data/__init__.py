"""Data for TensorFlow's ranks: :func:`shard` divides a data set, and ``compute_service`` prepares it in other jobs."""

from __future__ import annotations

from horovod._models.evaluation import evaluate
from horovod.common.sharding.shard import shard, steps_per_epoch

__all__ = ["evaluate", "shard", "steps_per_epoch"]
