"""alltoall: every rank sends some of its rows to every rank. It blocks until the result is complete."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission import collectives
from horovod.mxnet.ops.arguments import split_rows, whole
from horovod.mxnet.ops.arrays import allocator
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import reading, specs, to_new

PREFIX = "horovod_alltoall"


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` consecutive rows of ``tensor`` to rank r of the process set. Every member must call it. It blocks.

    Without ``splits`` the rows are divided evenly. The dtype and all dimensions but the first must agree.

    Args:
        tensor: an NDArray of at least one dimension, of a dtype as for :func:`horovod.mxnet.ops.allreduce.allreduce`.
        splits: a list or an int32 NDArray, with one entry for each rank of the set.
        name: identifies the call. Calls without a name are matched by their order.
        priority: accepted for compatibility. The call blocks in any case.
        process_set: the ranks that exchange rows. This rank must be a member.

    Returns:
        A new NDArray of the received rows, by source rank. If ``splits`` is given, a tuple of it and an int32 NDArray with the
        number of rows from each rank.

    Raises:
        ValueError: splits that do not fit the rows, are not one-dimensional, or not 32-bit integers. Otherwise as
            :func:`horovod.mxnet.ops.allgather.allgather`.
    """
    received: list[int] = []

    def act(sources: list[Any]) -> list[Any]:
        outputs: dict[int, Any] = {}
        allocate, set_id = allocator(sources, outputs), process_set.process_set_id
        with reading(sources, name or PREFIX) as inputs:
            handle = collectives.alltoall(PREFIX, name, inputs[0], rows, allocate, set_id, awaited=True)
            handle.wait()
        received.extend(handle.result)
        return [outputs[0]]

    with of_both_kinds():
        whole(priority, "priority")
        specs([tensor], name or PREFIX)
        rows = split_rows(splits)
        output = to_new([tensor], act)[0]
    if splits is None:
        return output
    make = mx.np.array if isinstance(tensor, mx.np.ndarray) else mx.nd.array
    return output, make(np.array(received, np.int32), dtype=np.int32)
