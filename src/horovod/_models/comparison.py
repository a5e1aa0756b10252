"""Compares data of the ranks without a wait: the requests run beside the gradients of the next two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import consensus
from horovod.common.alike import Alike
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import allgather, prepared_allreduce

Tell = Callable[[Mapping[int, bytes] | None], None]
"""Takes the data of each rank, by global rank, or None if all are equal."""


class Comparison:
    """One comparison. The ranks compare digests first and, if these differ, the data. Every member of the process set must make
    it.

    Args:
        name: the name of the request. Only one comparison of a name runs at a time.
        held: this rank's data.
        process_set: the ranks that compare.
        line: the line of the script that made the optimizer, for errors.
        tell: called with the result, the same on all ranks.
        what: the property that must agree, for the error. None: a difference is no error.
    """

    def __init__(
        self, name: str, held: bytes, process_set: ProcessSet, line: str, tell: Tell, what: Alike | None
    ) -> None:
        self.tell, self.what, self._name, self._held, self._set = tell, what, name, held, process_set
        self._terms = consensus.sum_terms(held)
        self._sums = np.empty_like(self._terms)
        described = [(name, DataType.INT64, self._terms.shape)]
        prepared = prepared_allreduce(name, described, ReduceOp.SUM, 1.0, 1.0, line)
        self._digests = prepared.submit(process_set.process_set_id, [self._terms], [self._sums])
        self._gathered: list[Array] = []

    def differs(self) -> bool:
        """Whether the ranks' data differ; the same answer on all ranks. Called in the next step."""
        self._digests.wait()
        return not consensus.all_equal(self._terms, self._sums)

    def gather(self) -> None:
        """Begin to gather the data of all ranks."""
        row = np.frombuffer(consensus.pack(running().identity.rank, self._held), np.uint8).copy()

        def allocate(_: int, rows: int) -> Array:
            self._gathered.append(np.empty(rows, np.uint8))
            return self._gathered[0]

        tensors = [Tensor(row, DataType.UINT8, row.shape)]
        self._rows = allgather("allgather", f"{self._name}.held", tensors, allocate, self._set.process_set_id)

    def held(self) -> dict[int, bytes]:
        """The data of each rank. Called in the step after :meth:`gather`."""
        self._rows.wait()
        return consensus.unpack(self._gathered[0].tobytes())
