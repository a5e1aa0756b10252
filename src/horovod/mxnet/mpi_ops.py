"""``horovod.mxnet.mpi_ops``: every operation under the import path that existing scripts use."""

from __future__ import annotations

from horovod._bindings import exported_names
from horovod._bindings.exported_names import *  # noqa: F403  every binding exports all of them
from horovod._bindings.reductions import Adasum, Average, Max, Min, Product, Sum, handle_average_backwards_compatibility
from horovod.common.basics import HorovodBasics, init, shutdown
from horovod.mxnet.ops.allgather import allgather, grouped_allgather
from horovod.mxnet.ops.allreduce import allreduce, allreduce_, grouped_allreduce, grouped_allreduce_
from horovod.mxnet.ops.alltoall import alltoall
from horovod.mxnet.ops.broadcast import broadcast, broadcast_
from horovod.mxnet.ops.reducescatter import grouped_reducescatter, reducescatter

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "_basics",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "reducescatter",
    "shutdown",
]
__all__ += exported_names.__all__

_basics = HorovodBasics(__file__)
