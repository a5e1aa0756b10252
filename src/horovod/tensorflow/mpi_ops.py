"""``horovod.tensorflow.mpi_ops``: every operation under the import path that existing scripts use."""

from __future__ import annotations

from horovod.common import basics as _basics
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
from horovod.common.util import check_extension, gpu_available
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.core.dynamic_sets import add_process_set, remove_process_set
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.tensorflow.allgather import allgather, grouped_allgather
from horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from horovod.tensorflow.alltoall import alltoall
from horovod.tensorflow.broadcast import broadcast, broadcast_
from horovod.tensorflow.lifecycle import init, join, shutdown
from horovod.tensorflow.names import _normalize_name
from horovod.tensorflow.reducescatter import grouped_reducescatter, reducescatter
from horovod.tensorflow.topology import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "_basics",
    "_normalize_name",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
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
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
