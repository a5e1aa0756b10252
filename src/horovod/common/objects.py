"""Any picklable object from one rank to all, or from all to all. The same in every binding: no framework is needed for it.

Pickles travel only between ranks that have proved to know the job's secret.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import numpy as np

from horovod.comm.datatypes import Array, DataType
from horovod.common.basics import rank
from horovod.core import collectives
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.core.tensor import Tensor


def _pickled(obj: Any) -> Array:
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank ``root_rank``'s object on every member of ``process_set``, which must all call it.

    Args:
        obj: anything cloudpickle takes; only the root's matters.
        root_rank: a global rank of the set.
        name: identifies the call; the default is the same for all objects, so calls must come in the same order everywhere.

    Returns:
        On the root ``obj`` itself, elsewhere a copy.

    Raises:
        ValueError: the root is not a member of the set, or this rank is not.
        HorovodInternalError: the ranks disagree, or the job has failed.
    """
    name = name or "object"

    def broadcast(array: Array, data_type: DataType, label: str) -> None:
        tensors = [Tensor(array, data_type, array.shape)]
        set_id = process_set.process_set_id
        collectives.broadcast("broadcast", f"{name}.{label}", tensors, root_rank, set_id, awaited=True).wait()

    data = _pickled(obj) if rank() == root_rank else None
    length = np.array([0 if data is None else data.size], np.int64)
    broadcast(length, DataType.INT64, "sz")
    if data is None:
        data = np.empty(int(length[0]), np.uint8)
    broadcast(data, DataType.UINT8, "t")
    return obj if rank() == root_rank else cloudpickle.loads(data.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every member's object, in rank order. Every member must call it; one that has joined has none in the list.

    Args:
        obj: anything cloudpickle takes.
        name: identifies the call, as in :func:`broadcast_object`.

    Raises:
        ValueError: this rank is not a member of the set.
        HorovodInternalError: the ranks disagree, or the job has failed.
    """
    name = name or "object"
    data = _pickled(obj)
    gathered: list[Array] = []

    def allocate(_: int, rows: int) -> Array:
        gathered.append(np.empty(rows, np.uint8))
        return gathered[0]

    tensors = [Tensor(data, DataType.UINT8, data.shape)]
    set_id = process_set.process_set_id
    handle = collectives.allgather("allgather", f"{name}.t", tensors, allocate, set_id, awaited=True)
    handle.wait()
    objects, start = [], 0
    for length in filter(None, handle.result[0]):  # even nothing makes a pickle of some length
        objects.append(cloudpickle.loads(gathered[0][start : start + length].tobytes()))
        start += length
    return objects
