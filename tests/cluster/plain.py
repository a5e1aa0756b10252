"""Horovod without a framework, for the ranks of tests that are about hosts: they start in a tenth of the time.

Scripts find it as ``plain``: :meth:`cluster.conftest.Cluster.script` puts it beside them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.core.submission import collectives
from horovod.core.submission.tensor import Tensor

init, shutdown, rank, size = basics.init, basics.shutdown, basics.rank, basics.size


def allreduce(values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The sum over all ranks."""
    result = np.empty_like(values)
    source, target = (Tensor(array, DataType.FLOAT32, (array.size,)) for array in (values, result))
    collectives.allreduce("allreduce", name, [source], [target], ReduceOp.SUM, awaited=True).wait()
    return result
