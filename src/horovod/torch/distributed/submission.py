"""Submits the tensors that PyTorch passes to a group to the group's process set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.context import runs
from horovod.core.negotiation.messages import HOST, Operation
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission.prepared import submit
from horovod.core.submission.requests import prepared_call
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import memory_of
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.flat_tensors import (
    Results,
    apart,
    expects,
    flat,
    overlapping,
    plain_views,
    results_into_each,
    scratch_like,
    together,
    writes_back,
)
from horovod.torch.distributed.futures import Origin, present
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.work import Finish, HorovodWork
from horovod.torch.tensors import empty_like, plain_view

PREFIX = "torch.distributed"
"""The first part of the names of all calls. The calls of a group share one counter, so all ranks must make the same calls in
the same order."""

_OPERATIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVERAGE,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}
_NO_LIMIT = timedelta(0)
MOVED = ReductionArguments()
"""The reduction arguments of a collective that reduces nothing."""
DDP_BUCKET = ReductionArguments(ReduceOp.SUM, chosen_form=None)
"""The reduction of a bucket of DDP's gradients. The calls of a script itself are never compressed."""
_OURS = str(Path(__file__).parent.parent) + "/"


def checked_reduction(op: Any) -> ReductionArguments:
    """The arguments of a reduction by ``op``, which is a ``torch.distributed.ReduceOp`` or a member of it.

    Raises:
        ArgumentError: the core has no such reduction, or the factor of PREMUL_SUM is a tensor of several elements.
    """
    kind = getattr(op, "op", op)
    known = _REDUCING.get(kind)
    if known is not None:
        return known
    if kind.name == "PREMUL_SUM":
        _, factor = op.__getstate__()  # PyTorch 2.1 has no attribute of it
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ArgumentError("the factor of ReduceOp.PREMUL_SUM must be one number, not a tensor of several")
        return ReductionArguments(ReduceOp.SUM, prescale=float(factor))
    found = _OPERATIONS.get(kind.name)
    if found is None:
        raise ArgumentError(
            f"ReduceOp.{kind.name} is not supported; use one of {', '.join(_OPERATIONS)} and PREMUL_SUM"
        )
    known = _REDUCING[kind] = ReductionArguments(found)
    return known


_REDUCING: dict[Any, ReductionArguments] = {}


class Submitter:
    """Submits the calls of one group.

    Args:
        membership: the membership of the group.
        seconds: the time limit of a wait for a send or a receive. The time limit of collectives is the runtime's.
        names_callbacks: whether Python code gets the futures of calls. Then collectives that their callbacks call are named
            after the future. Otherwise such collectives raise NotImplementedError.

    Attributes:
        size: the number of ranks in the group.
        index: this rank's number in the group.
        calls: the number of collectives that the script has called. Those of callbacks are not counted.
    """

    def __init__(self, membership: GroupMembership, seconds: float, names_callbacks: bool = True) -> None:
        self.membership = membership
        self.seconds = seconds
        self._names_callbacks = names_callbacks
        self.size = len(membership.ranks)
        self.index = membership.own_rank
        self.calls = membership.calls
        self._futures = Origin("after")

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
    ) -> HorovodWork:
        """Submit one collective. Every rank of the group must submit the same. Call it before the operation's method returns:
        the stack shows whether Python code has called the group.

        Args:
            what: the operation, for error messages.
            inputs: the memory to read; empty for a broadcast.
            outputs: the memory to write, if its sizes are known.
            results: the tensors with the results for the caller.
            options: the options of the call.
            reduction: the reduction.
            root: the rank in the group that receives or sends the data; -1 if there is none. All ranks must agree.
            splits: of an alltoall: the number of rows for each rank.
            allocate: makes the outputs, if their sizes are known only once the ranks have agreed.
            finish: copies the results to ``results``; None if the collective writes there.
            memory: the memory of the tensors; None for host memory.
            described: the tensors of the request, if they are others than the inputs or outputs.
            errors: for error feedback, as of :class:`~horovod.core.requests.batch.Entry`.

        Raises:
            ValueError: the reduction does not support a type.
            HorovodInternalError: the runtime that the group belongs to has ended, or the job has failed.
            NotImplementedError: a callback whose calls cannot be named has called this.
        """
        membership = self.membership
        if not runs(membership.generation):
            membership.check()  # raises the error
        origin = present.origin
        call = prepared_call(
            operation,
            PREFIX,
            None if origin is None else origin.next(),
            described or inputs or outputs,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            root if root < 0 else membership.ranks[root],
            splits,
            HOST if memory is None else memory.device,
            compression=reduction.form,
        )
        awaited = not getattr(options, "asyncOp", True)  # whether the caller will wait for the operation at once
        handle = submit(membership.number, call.request, inputs, outputs, allocate, awaited, errors)
        if origin is None:
            self.calls.made += 1
        follow = self._follow if self._names_callbacks and calling_file() == DISPATCHER else None
        timeout = getattr(options, "timeout", None)
        limited = isinstance(timeout, timedelta) and timeout > _NO_LIMIT
        seconds = timeout.total_seconds() if limited else -1  # type: ignore[union-attr]  # it is a timedelta then
        return HorovodWork(handle, memory, results, what, finish, seconds, follow)

    @property
    def compresses(self) -> bool:
        """Whether DDP's buckets are compressed, because HOROVOD_COMPRESSION asks for it and the ranks are on several hosts."""
        worker = self.membership.generation.workers.get(self.membership.number)  # None once the runtime has ended
        return bool(DDP_BUCKET.form) and worker is not None and worker.executor.compresses

    def _follow(self) -> Origin:
        """The origin for callbacks of the future of a call that is made now."""
        return Origin((present.origin or self._futures).next())

    def reduce(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        reduction: ReductionArguments,
        options: Any,
        root: int = -1,
        results: Sequence[torch.Tensor] = (),
        finish: Finish | None = None,
        errors: Errors = (),
    ) -> HorovodWork:
        """Reduce tensors in place, in one request.

        Args:
            root: the only rank of the group that gets the results; -1: all do.
            results: the tensors with the results for the caller, if they are others than ``tensors``.
            finish: copies the results to them.
            errors: as of :meth:`start`.
        """
        receives = root in (-1, self.index)
        plain = plain_view(tensors[0]) if len(tensors) == 1 else None
        memory: TorchMemory | None = None
        if plain is not None:
            read = [plain]
            written = read if receives else [scratch_like(plain)]
        else:
            sources = apart([flat(tensor, reduced=True) for tensor in tensors])
            targets = sources if receives else [torch.empty_like(source) for source in sources]
            memory = self.memory_of(sources, reduction)
            read, written = memory.reduce(sources, targets)
            if receives:
                finish = both(writes_back(tensors, sources), finish)
        return self.start(
            what,
            Operation.ALLREDUCE,
            read,
            written,
            results or tensors,
            options,
            reduction,
            root,
            finish=finish,
            memory=memory,
            errors=errors,
        )

    def memory_of(self, tensors: Sequence[torch.Tensor], reduction: ReductionArguments | None = None) -> TorchMemory:
        """The memory of the tensors of one call; see :func:`horovod.torch.device.memory.memory_of`."""
        return memory_of(tensors, reduction)

    @property
    def goes_on(self) -> bool:
        """Whether the group goes on with the ranks that are left when others are lost."""
        return False

    def end(self) -> None:
        """The script leaves the group."""

    def gather(
        self,
        what: str,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: Any,
        finish: Finish | None = None,
    ) -> HorovodWork:
        """Concatenate the inputs ``i`` of all ranks in the flat tensor ``targets[i]``.

        Args:
            outputs: the tensors with the results for the caller.
            finish: copies the results from ``targets`` to ``outputs``; None if they share memory.
        """
        sources = [flat(tensor) for tensor in inputs]
        memory = self.memory_of(sources)
        results = Results(memory, sources, targets)
        return self.start(
            what,
            Operation.ALLGATHER,
            memory.read(sources),
            (),
            outputs,
            options,
            allocate=results.allocate,
            finish=both(results.finish, finish),
            memory=memory,
        )

    def exchange(
        self,
        what: str,
        inputs: Sequence[torch.Tensor],
        sent: Sequence[int],
        outputs: Sequence[torch.Tensor],
        received: Sequence[int],
        options: Any,
        root: int = -1,
    ) -> HorovodWork:
        """Send ``sent[r]`` elements of the inputs to each rank r, and receive ``received[r]`` elements from it in the outputs.

        Args:
            inputs, outputs: one tensor for each rank, or one for all ranks, which holds the elements in the order of the ranks,
                or none. There is at least one in all.
            root: see :meth:`start`.

        Raises:
            ArgumentError: this rank sends itself more or fewer elements than it has room for.
        """
        index = self.index
        if sent and received and sent[index] != received[index]:
            raise ArgumentError(
                f"{what}: invalid tensor size at index {index}: this rank sends itself {sent[index]} elements, with room for "
                f"{received[index]}"
            )
        views = plain_views([*inputs, *outputs])
        if views is not None and not overlapping(inputs, sent, outputs, received, self.index):
            nothing = Tensor(views[0].array[:0], views[0].data_type, (0,))
            sources, targets = views[: len(inputs)] or [nothing], views[len(inputs) :] or [nothing]
            return self.start(
                what,
                Operation.ALLTOALL,
                sources,
                (),
                outputs,
                options,
                root=root,
                splits=sent,
                allocate=results_into_each(targets),
                finish=expects(what, received) if len(outputs) == 1 else None,
                described=[together(sources)],
            )
        read, written = [flat(each) for each in inputs], [flat(each) for each in outputs]
        like = (read or written)[0]
        source = read[0] if len(read) == 1 else torch.cat(read) if read else like[:0]
        if len(written) == 1 and not overlapping(read, sent, written, received, self.index):
            target = written[0]
        else:
            target = empty_like(like.new_empty(sum(received)))
        pieces = torch.split(target, [each.numel() for each in written]) if written else []
        memory = self.memory_of([source])
        results = Results(memory, [source], [target])
        finish = both(results.finish, writes_back(outputs, pieces))
        return self.start(
            what,
            Operation.ALLTOALL,
            memory.read([source]),
            (),
            outputs,
            options,
            root=root,
            splits=sent,
            allocate=results.allocate,
            finish=both(expects(what, received) if outputs else None, finish),
            memory=memory,
        )


DISPATCHER = dist.distributed_c10d.__file__
"""The Python code of ``torch.distributed`` that calls groups. They are also called by C++ code, and by the script directly."""


def calling_frame() -> FrameType | None:
    """The frame of the Python code that has called the group, itself or through C++ code. It is not of ``horovod.torch``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def calling_file() -> str:
    """The file of the Python code that has called the group."""
    frame = calling_frame()
    return "" if frame is None else frame.f_code.co_filename


def both(first: Finish | None, second: Finish | None) -> Finish | None:
    if first is None or second is None:
        return first or second

    def finish(handle: Handle) -> None:
        first(handle)
        second(handle)

    return finish
