"""Horovod for TensorFlow::

import horovod.tensorflow as hvd
hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from __future__ import annotations

try:
    import tensorflow as _tensorflow  # noqa: F401  so that the reason is clear before anything else fails
except ImportError as error:
    raise ImportError(
        "horovod.tensorflow needs TensorFlow 2.16 or newer, which cannot be imported here: "
        f"{error}. Install it with: pip install 'horovod[tensorflow]'"
    ) from error

from horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
)
from horovod.common.util import check_extension, gpu_available, split_list
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.core.dynamic_sets import add_process_set, remove_process_set
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.tensorflow.adasum_optimizer import _DistributedAdasumOptimizer
from horovod.tensorflow.allgather import allgather, grouped_allgather
from horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from horovod.tensorflow.alltoall import alltoall
from horovod.tensorflow.broadcast import broadcast, broadcast_
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.lifecycle import init, join, shutdown
from horovod.tensorflow.optimizer import DistributedOptimizer, _DistributedOptimizer
from horovod.tensorflow.reducescatter import grouped_reducescatter, reducescatter
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape, _DistributedGradientTape
from horovod.tensorflow.topology import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "_DistributedAdasumOptimizer",
    "_DistributedGradientTape",
    "_DistributedOptimizer",
    "_cache",
    "_executing_eagerly",
    "_make_subgraph",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "vars_to_refs",
]
