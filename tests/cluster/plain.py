"""Horovod without a framework, for the ranks of tests that are about hosts: they start in a tenth of the time.

Scripts find it as ``plain``: :meth:`cluster.conftest.Cluster.script` puts it beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives

init, shutdown, rank, size = basics.init, basics.shutdown, basics.rank, basics.size


def allreduce(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The sum over all ranks."""
    result = np.empty_like(values)
    collectives.allreduce("allreduce", name, [_tensor(values)], [_tensor(result)], ReduceOp.SUM, awaited=True).wait()
    return result


def sums(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """The sums of several arrays over all ranks. They are under way together; odd ranks begin with the last one."""
    inputs = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    results = {name: np.empty_like(array) for name, array in inputs.items()}
    handles = []
    for name in list(arrays)[:: -1 if basics.rank() % 2 else 1]:
        tensors = [_tensor(inputs[name])], [_tensor(results[name])]
        handles.append(collectives.allreduce("allreduce", name, *tensors, ReduceOp.SUM))
    for handle in handles:
        handle.wait()
    return results


def allgather(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """What all ranks give, in their order."""
    made: list[NDArray[np.float32]] = []

    def allocate(_: int, rows: int) -> NDArray[np.float32]:
        made.append(np.empty(rows, np.float32))
        return made[0]

    collectives.allgather("allgather", name, [_tensor(values)], allocate, awaited=True).wait()
    return made[0]


def broadcast(values: NDArray[np.float32], root: int, name: str) -> NDArray[np.float32]:
    """What rank ``root`` gives."""
    result = values.copy()
    collectives.broadcast("broadcast", name, [_tensor(result)], root, awaited=True).wait()
    return result


def _tensor(array: NDArray[np.float32]) -> Tensor:
    return Tensor(array.reshape(-1), DataType.FLOAT32, array.shape)
