"""The default group of a job that goes on after a loss, and the operations that it refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.on_loss import refusals
from horovod.torch.distributed.on_loss.continuing_submission import ContinuingSubmitter
from horovod.torch.distributed.process_group import HorovodProcessGroup
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.uncompiled import uncompiled


@uncompiled
class ContinuingGroup(HorovodProcessGroup):
    """See :class:`HorovodProcessGroup`."""

    _submitter: ContinuingSubmitter

    @property
    def origins(self) -> tuple[int, ...]:
        """By rank, as the script sees the ranks now, the rank that the process had at the beginning."""
        return self._submitter.origins

    def average(self, bucket: torch.Tensor) -> Any:
        """A future of the average of a bucket of gradients of DistributedDataParallel, in a new tensor."""
        return self._submitter.average([bucket], [torch.empty_like(bucket)]).future_of_one()

    def average_into(
        self, gradients: Sequence[torch.Tensor], results: Sequence[torch.Tensor], options: Any
    ) -> HorovodWork:
        """See :meth:`ContinuingSubmitter.average`."""
        return self._submitter.average(gradients, results, options)

    def allgather(self, *arguments: Any, **options: Any) -> HorovodWork:
        return self._by_present_size(super().allgather, *arguments, **options)

    def gather(self, *arguments: Any, **options: Any) -> HorovodWork:
        return self._by_present_size(super().gather, *arguments, **options)

    def scatter(self, *arguments: Any, **options: Any) -> HorovodWork:
        return self._by_present_size(super().scatter, *arguments, **options)

    def reduce_scatter(self, *arguments: Any, **options: Any) -> HorovodWork:
        return self._by_present_size(super().reduce_scatter, *arguments, **options)

    def alltoall(self, *arguments: Any, **options: Any) -> HorovodWork:
        return self._by_present_size(super().alltoall, *arguments, **options)

    def _by_present_size(self, operation: Callable[..., HorovodWork], *arguments: Any, **options: Any) -> HorovodWork:
        """Call an operation that takes a tensor for each rank. Its error says so if there were more ranks before."""
        try:
            return operation(*arguments, **options)
        except ArgumentError as error:
            lost = sorted({*range(self._submitter.first_size)} - {*self.origins})
            if not lost:
                raise
            raise ArgumentError(
                f"{error}. Rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of {self._submitter.first_size} "
                f"{'were' if len(lost) > 1 else 'was'} lost before this call: take the number of ranks from "
                "torch.distributed.get_world_size() in each call."
            ) from None

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> HorovodWork:
        _refuse("send()")

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> HorovodWork:
        _refuse("recv()")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HorovodWork:
        _refuse("recv()")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        _refuse("monitored_barrier(); use barrier()")

    def abort(self) -> None:
        _refuse("abort()")

    def split_group(self, ranks: Sequence[int], *arguments: Any, **options: Any) -> None:
        refuse_groups()


def refuse_groups() -> NoReturn:
    """Refuse a group of some ranks. Raises NotImplementedError."""
    _refuse("groups beside the default one (new_group(), split_group(), device meshes of several dimensions)")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(refusals.text(what))
