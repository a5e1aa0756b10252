"""``horovod.tensorflow.mpi_ops``: every operation under the import path that existing scripts use."""

from __future__ import annotations

from horovod._bindings import exported_names
from horovod._bindings.exported_names import *  # noqa: F403  every binding exports all of them
from horovod._bindings.reductions import Adasum, Average, Max, Min, Product, Sum, handle_average_backwards_compatibility
from horovod.common.basics import HorovodBasics, is_homogeneous
from horovod.common.util import check_extension, gpu_available
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.tensorflow.graph.names import _normalize_name
from horovod.tensorflow.lifecycle import init, join, shutdown
from horovod.tensorflow.ops.allgather import allgather, grouped_allgather
from horovod.tensorflow.ops.allreduce import allreduce, grouped_allreduce
from horovod.tensorflow.ops.alltoall import alltoall
from horovod.tensorflow.ops.broadcast import broadcast, broadcast_
from horovod.tensorflow.ops.private_names import _allreduce, _grouped_allreduce, _grouped_reducescatter, _reducescatter
from horovod.tensorflow.ops.reducescatter import grouped_reducescatter, reducescatter
from horovod.tensorflow.ops.topology import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "_allreduce",
    "_basics",
    "_grouped_allreduce",
    "_grouped_reducescatter",
    "_normalize_name",
    "_reducescatter",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_extension",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "shutdown",
    "size_op",
]
__all__ += exported_names.__all__

_basics = HorovodBasics(__file__)
