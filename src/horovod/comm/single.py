"""The engine for a group of one rank: it copies and scales, so that callers need no special case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.spans import Vectors, arrays_of


class SingleCommunicator(Communicator):
    """Rank 0 of a group of one. It never waits, so :meth:`abort` does nothing."""

    name: ClassVar[str] = "single"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self._workspace = Workspace()

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        for source, target in zip(inputs, outputs, strict=True):
            if source is not target or prescale != 1.0 or postscale != 1.0:
                reduce_into(target, [source], op, prescale, postscale, self._workspace)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        for source, target in zip(arrays_of(inputs), arrays_of(outputs), strict=True):
            np.copyto(target, source)

    def broadcast(self, vectors: Vectors, root: int) -> None:
        pass

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        np.copyto(target[0], source[0][: sent[0]])

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self.allreduce(inputs, outputs, op, prescale, postscale)

    def barrier(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass
