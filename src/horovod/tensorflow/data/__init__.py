"""Data for TensorFlow's ranks: :func:`shard` divides a data set, and ``compute_service`` prepares it in other jobs."""

from __future__ import annotations

from horovod._bindings.sharding.shard import shard, steps_per_epoch
from horovod._models.evaluation import evaluate

__all__ = ["evaluate", "shard", "steps_per_epoch"]
