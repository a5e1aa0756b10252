"""``horovod.torch.mpi_ops``: every operation under the import path that existing scripts use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod._bindings import exported_names
from horovod._bindings.exported_names import *  # noqa: F403  every binding exports all of them
from horovod._bindings.reductions import Adasum, Average, Max, Min, Product, Sum, handle_average_backwards_compatibility
from horovod.common import basics
from horovod.common.basics import HorovodBasics, is_homogeneous
from horovod.common.exceptions import HorovodInternalError
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id
from horovod.torch.device import staging
from horovod.torch.device.runtime import torch_devices
from horovod.torch.ops import handles
from horovod.torch.ops.allgather import (
    HorovodAllgather,
    HorovodGroupedAllgather,
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch.ops.allreduce import (
    HorovodAllreduce,
    HorovodGroupedAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.ops.alltoall import HorovodAlltoall, alltoall, alltoall_async
from horovod.torch.ops.broadcast import HorovodBroadcast, broadcast, broadcast_, broadcast_async, broadcast_async_
from horovod.torch.ops.handles import poll, synchronize
from horovod.torch.ops.reducescatter import (
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.ops.sparse_allreduce import sparse_allreduce_async
from horovod.torch.uncompiled import share_uncompiled, uncompiled

__all__ = [
    "Adasum",
    "Average",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += exported_names.__all__

_basics = HorovodBasics(__file__)

share_uncompiled(
    globals(),
    exported_names.add_process_set,
    exported_names.host_process_set,
    exported_names.remove_process_set,
    exported_names.start_timeline,
    exported_names.stop_timeline,
)


@uncompiled
def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """As :func:`horovod.common.basics.init`. Handles of an earlier job are forgotten."""
    if not basics.is_initialized():
        handles.clear()
        torch_devices.forget()
    basics.init(comm, process_sets)


@uncompiled
def shutdown() -> None:
    """As :func:`horovod.common.basics.shutdown`. Handles are forgotten."""
    basics.shutdown()
    handles.clear()
    torch_devices.forget()


@uncompiled
def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have called it.

    Until then this rank takes part in the other ranks' collectives without data:

    ===================  =============================================================================================
    allreduce, grouped   Sum and Average: zeros; an Average still divides by the number of all ranks. Adasum: zeros, which
                         are ignored. Min, Max and Product: only the ranks that have not joined.
    allgather            No rows.
    broadcast            Fails if the root has joined.
    alltoall             No rows. Fails if a rank sends rows to one that has joined.
    reducescatter        Fails, because the rows of the ranks that have joined would be lost.
    barrier              Waits only for the ranks that have not joined.
    ===================  =============================================================================================

    A collective that fails raises on all ranks that called it, with a text that names the ranks, and the job goes on.
    ``join()`` only concerns the global process set: complete the collectives of other sets before. After a join, the count of
    unnamed calls restarts, so ranks may have made different numbers of them.

    Args:
        device: the number of the GPU on which zeros are made, if an engine moves the memory of GPUs and this rank has used no
            GPU for collectives yet; negative: the current one.

    Returns:
        The global rank that joined last.

    Raises:
        HorovodInternalError: not initialised, or the job has failed.
    """
    if running().device_engine:
        torch_devices.use(None if device < 0 else torch.device("cuda", device))
    staging.drain()  # earlier submissions must be announced first
    handle = collectives.join()
    handle.wait()
    running().all_joined()
    return int(handle.result)


@uncompiled
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member of ``process_set`` has called it. Threads of one rank take turns.

    Args:
        process_set: the ranks that wait for each other. This rank must be a member.

    Raises:
        TypeError, ValueError: ``process_set`` is not a registered process set, or this rank is not a member.
        HorovodInternalError: not initialised, or the job has failed.
    """
    collectives.wait_at_barrier(set_id(process_set))
