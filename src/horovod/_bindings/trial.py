"""One rank of a minimal job: init, one allreduce, shutdown. ``horovodrun --check-build`` runs it on two ranks.

Run as ``python -m horovod._bindings.trial``. Ends with an exception where anything is wrong.
"""

from __future__ import annotations

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives


def main() -> None:
    basics.init()
    try:
        identity = context.current().identity
        vector = np.full(100_000, identity.rank + 1, np.float32)
        tensors = [Tensor(vector, DataType.FLOAT32, vector.shape)]
        collectives.allreduce("trial", "sum", tensors, tensors, op=ReduceOp.SUM).wait()
        expected = identity.size * (identity.size + 1) // 2
        if not (vector == expected).all():
            raise ArithmeticError(f"the sum of all ranks is {vector[:3]} here, and should be {expected}")
    finally:
        context.shutdown()


if __name__ == "__main__":
    main()
