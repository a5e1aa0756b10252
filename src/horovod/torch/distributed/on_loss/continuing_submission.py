"""The script's side of a group that goes on: takes its calls, and shows it the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.utils
import torch.nn.parallel.distributed

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.observe.call_site import caller
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import host_memory
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.flat_tensors import flat
from horovod.torch.distributed.futures import present
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.on_loss import refusals
from horovod.torch.distributed.on_loss.repeatable_call import RepeatableCall
from horovod.torch.distributed.on_loss.survivor import Survivor
from horovod.torch.distributed.submission import DISPATCHER, MOVED, Submitter, calling_file
from horovod.torch.distributed.work import Finish, HorovodWork
from horovod.torch.uncompiled import uncompiled

_NO_LIMIT = timedelta(0)
_DDP = (torch.nn.parallel.distributed.__file__, torch.distributed.utils.__file__)
"""The code that broadcasts what all ranks have, for DistributedDataParallel: any of them may be the root."""
_LATER, _SUM = SimpleNamespace(asyncOp=True), ReductionArguments(ReduceOp.SUM)


@uncompiled
class KeptWork(HorovodWork):
    """A work whose end shows the script the ranks that have carried the call out."""

    def __init__(self, call: RepeatableCall, survivor: Survivor, *arguments: Any) -> None:
        super().__init__(call.shown, *arguments)
        self._number = call.number
        self._survivor = survivor

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        try:
            return super().wait(timeout)
        finally:
            if self._handle.done():
                self._survivor.show_ranks(self._number)


class ContinuingSubmitter(Submitter):
    """Submits the calls of a group that goes on after a loss. ``size`` and ``index`` are what the script sees.

    Args:
        membership, seconds: as for :class:`Submitter`.
        time_limit: the time limit of the group.

    Attributes:
        first_size: the number of ranks when the group was made.
    """

    def __init__(self, membership: GroupMembership, seconds: float, time_limit: timedelta) -> None:
        super().__init__(membership, seconds)
        self.first_size = self.size
        self._survivor = Survivor(membership, time_limit, self._take_ranks)

    def _take_ranks(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    @property
    def goes_on(self) -> bool:
        return True

    @property
    def origins(self) -> tuple[int, ...]:
        """By rank, as the script sees the ranks now, the rank that the process had at the beginning."""
        return self._survivor.shown_origins

    def end(self) -> None:
        self._survivor.end()
        self.membership = self._survivor.membership

    def memory_of(self, tensors: Sequence[torch.Tensor], reduction: ReductionArguments | None = None) -> TorchMemory:
        """As of :class:`Submitter`, of tensors in host memory. Raises NotImplementedError for others."""
        if not all(each.is_cpu for each in tensors):
            raise NotImplementedError(refusals.text("tensors on a device"))
        return host_memory

    def average(
        self, gradients: Sequence[torch.Tensor], results: Sequence[torch.Tensor], options: Any = _LATER
    ) -> HorovodWork:
        """Sum gradients of DistributedDataParallel, divided by the number of ranks that take part.

        Args:
            gradients: contiguous tensors in host memory. They stay as they are.
            results: as many new tensors.
            options: the options of the call.
        """
        sources = [flat(each, reduced=True) for each in gradients]
        memory = self.memory_of(sources)
        read, written = memory.reduce(sources, [flat(each, reduced=True) for each in results])
        return self.start(
            "all_reduce",
            Operation.ALLREDUCE,
            read,
            written,
            results,
            options,
            _SUM,
            memory=memory,
            averages=True,
            new_outputs=True,
        )

    def start(
        self,
        what: str,
        operation: Operation,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        results: Sequence[torch.Tensor],
        options: Any,
        reduction: ReductionArguments = MOVED,
        root: int = -1,
        splits: Sequence[int] = (),
        allocate: Allocate | None = None,
        finish: Finish | None = None,
        memory: TorchMemory | None = None,
        described: Sequence[Tensor] = (),
        errors: Errors = (),
        averages: bool = False,
        new_outputs: bool = False,
    ) -> HorovodWork:
        """As of :class:`Submitter`. Nothing is compressed, as on one host in general.

        Args:
            averages: whether these are gradients of DistributedDataParallel, whose sum is to be divided by the number of ranks
                that take part.
            new_outputs: whether nothing but the returned work knows the outputs, so the engine may write into them at once.

        Raises:
            NotImplementedError: this call cannot go on after a loss.
            ArgumentError: the number of the root means another process than at the beginning.
        """
        if present.origin is not None:
            raise NotImplementedError(refusals.text("a collective in the callback of a future"))
        if not averages:
            refusals.check_callers()
        survivor = self._survivor
        origins = survivor.shown_origins
        of_first = root == 0 and calling_file() in _DDP
        if root >= 0 and origins[root] != root and not of_first:
            instead = "use a collective without a root" if origins[0] else "name rank 0, which stays the same process"
            raise ArgumentError(
                f"{what}: rank {root} is another process than at the beginning: ranks were lost, and the process that had the "
                f"number {origins[root]} has it now. Under --on-loss continue such a number is refused; {instead}."
            )
        call = survivor.submit(
            lambda number: RepeatableCall(
                number, what, caller(), operation, inputs, outputs, reduction, root, splits, allocate,
                described, origins, self.index, survivor, survivor.call_ended, averages, new_outputs, of_first,
            )
        )  # fmt: skip
        self.calls.made += 1
        follow = self._follow if calling_file() == DISPATCHER else None
        timeout = getattr(options, "timeout", None)
        limited = isinstance(timeout, timedelta) and timeout > _NO_LIMIT
        seconds = timeout.total_seconds() if limited else -1  # type: ignore[union-attr]  # it is a timedelta then
        return KeptWork(call, survivor, None, results, what, finish, seconds, follow)
