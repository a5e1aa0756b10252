"""allgather and its grouped form: they concatenate the arrays of all ranks along the first dimension, and block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission import collectives
from horovod.mxnet.ops.arguments import whole
from horovod.mxnet.ops.arrays import allocator
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import reading, specs, to_new

PREFIX = "horovod_allgather"


def _gather(arrays: Sequence[Any], name: str | None, priority: Any, process_set: ProcessSet) -> list[Any]:
    for array in arrays:
        if not isinstance(array, mx.nd.NDArray):
            raise AssertionError(f"allgather expects an mxnet.nd.NDArray, not {type(array).__name__}")

    def act(sources: list[Any]) -> list[Any]:
        outputs: dict[int, Any] = {}
        allocate = allocator(sources, outputs)
        with reading(sources, name or PREFIX) as inputs:
            collectives.allgather(PREFIX, name, inputs, allocate, process_set.process_set_id, awaited=True).wait()
        return [outputs[index] for index in range(len(sources))]

    with of_both_kinds():
        whole(priority, "priority")
        specs(arrays, name or PREFIX)
        return to_new(arrays, act)


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all members of ``process_set`` along dimension 0 in rank order, as a new NDArray.

    First dimensions may differ between ranks. The other dimensions and the dtype must agree. The call blocks until the result
    is complete.

    Args:
        tensor: an NDArray of at least one dimension, of a dtype as for :func:`horovod.mxnet.ops.allreduce.allreduce`.
        name: identifies the call. Calls without a name are matched by their order.
        priority: accepted for compatibility. The call blocks in any case.
        process_set: the ranks that gather. Every member must call it.

    Raises:
        AssertionError: ``tensor`` is not an NDArray.
        as :func:`horovod.mxnet.ops.allreduce.allreduce`, but this call itself raises all errors.
    """
    return _gather([tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """:func:`allgather` of several arrays in one request, with the same errors.

    Args:
        tensors: the arrays may differ in shape and dtype. Every member passes the same number of them in the same order.
        name, priority, process_set: as for :func:`allgather`.

    Returns:
        A list of new arrays in the order of ``tensors``. An empty list is returned unchanged.
    """
    return _gather(list(tensors), name, priority, process_set) if tensors else tensors
