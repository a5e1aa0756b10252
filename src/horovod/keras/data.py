"""Data for Keras's ranks on any backend: arrays, or a ``tf.data.Dataset`` if TensorFlow is installed."""

from __future__ import annotations

from horovod._bindings.sharding.shard import shard, steps_per_epoch
from horovod._models.evaluation import evaluate

__all__ = ["evaluate", "shard", "steps_per_epoch"]
