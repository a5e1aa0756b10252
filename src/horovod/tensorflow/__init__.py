"""Horovod for TensorFlow.

Every rank runs a script with these lines::

    import horovod.tensorflow as hvd
    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)
"""

from __future__ import annotations

from horovod._bindings.frameworks import missing as _missing

try:
    import tensorflow as _tensorflow  # so that the reason is clear before anything else fails
except Exception as error:
    raise _missing(error, "horovod.tensorflow", "TensorFlow 2.16 or newer", "tensorflow") from error

from horovod._bindings.exported_names import *  # noqa: F403  mypy does not find these through the next such line
from horovod.common.util import split_list
from horovod.tensorflow import data, elastic, mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.distributed_optimizer import DistributedOptimizer
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import *  # noqa: F403  this module exports all of them
from horovod.tensorflow.optimizer import _DistributedOptimizer
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from horovod.tensorflow.training.adasum_optimizer import _DistributedAdasumOptimizer
from horovod.tensorflow.training.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    _DistributedGradientTape,
)
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__path__.append(__path__[0].removesuffix("tensorflow") + "_old_paths/tensorflow")  # noqa: F405  every package has it
_IS_TF2 = True
_LegacyOptimizer = _tensorflow.compat.v1.train.Optimizer

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "_DistributedAdasumOptimizer",
    "_DistributedGradientTape",
    "_DistributedOptimizer",
    "_IS_TF2",
    "_LegacyOptimizer",
    "_cache",
    "_executing_eagerly",
    "_make_subgraph",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "data",
    "elastic",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]
__all__ += mpi_ops.__all__
