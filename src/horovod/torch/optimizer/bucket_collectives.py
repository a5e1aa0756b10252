"""The collectives for the compressor of one bucket. Their names contain that of the bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.ops.allgather import grouped_allgather_async
from horovod.torch.ops.allreduce import grouped_allreduce_async_
from horovod.torch.ops.handles import synchronize


class PendingHandle:
    """A running collective."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> list[torch.Tensor]:
        """Wait, and return the results. Raises HorovodInternalError if the collective failed."""
        return list(synchronize(self._handle))


class BucketCollectives:
    """Implements :class:`~horovod.torch.compression.bucket_compression.Collectives` for one bucket."""

    def __init__(self, bucket: str, op: ReduceOp, process_set: ProcessSet) -> None:
        self._bucket = bucket
        self._op = op
        self._process_set = process_set
        self.size = process_set.size() or 1
        self.average = op == ReduceOp.AVERAGE

    def allreduce(self, tensors: Sequence[torch.Tensor], label: str) -> PendingHandle:
        name = f"{self._bucket}.{label}"
        return PendingHandle(grouped_allreduce_async_(tensors, name=name, op=self._op, process_set=self._process_set))

    def allgather(self, tensors: Sequence[torch.Tensor], label: str) -> PendingHandle:
        return PendingHandle(grouped_allgather_async(tensors, f"{self._bucket}.{label}", self._process_set))
