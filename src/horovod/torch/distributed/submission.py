"""Makes requests from the tensors that PyTorch passes to a group, and submits them to the group's process set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import HOST, Operation, Request, TensorSpec
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission.prepared import device_of, submit, submit_arrays
from horovod.core.submission.requests import check_reduction, make_request
from horovod.observe.call_site import caller
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import host_memory, memory_of
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.flat_tensors import Results, apart, expects, flat, writes_back
from horovod.torch.distributed.futures import Origin, present_origin
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.plain import Key, key_of
from horovod.torch.distributed.work import Finish, HorovodWork
from horovod.torch.tensors import DATA_TYPES

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
_MOVED = ReductionArguments()
"""The reduction arguments of a collective that reduces nothing."""
_REMEMBERED = 1024
"""How many requests of each of both kinds, general and plain, a group keeps."""
_FOLDER = str(Path(__file__).parent)


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
        factor = op.factor
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


def limit_of(options: Any) -> float:
    """The time limit in the options of a call, in seconds; -1 if there is none."""
    timeout = getattr(options, "timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) and timeout > _NO_LIMIT else -1


def is_awaited(options: Any) -> bool:
    """Whether the caller will wait for the operation at once."""
    return not getattr(options, "asyncOp", True)


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
        self.index = membership.worker.index
        self.calls = membership.calls
        self._futures = Origin("after")
        self._requests: dict[Any, Request] = {}
        self._plain: dict[Key, tuple[ReductionArguments, Request]] = {}

    def submit(
        self,
        operation: Operation,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        allocate: Allocate | None = None,
        how: ReductionArguments = _MOVED,
        root: int = -1,
        splits: Sequence[int] = (),
        awaited: bool = False,
    ) -> Handle:
        """Submit one collective. Every rank of the group must submit the same.

        Args:
            inputs: the memory to read; empty for a broadcast.
            outputs: the memory to write, if its sizes are known.
            allocate: makes the outputs, if their sizes are known only once the ranks have agreed.
            how: the reduction.
            root: the rank in the group that receives or sends the data; -1 if there is none. All ranks must agree.
            splits: of an alltoall: the number of rows for each rank.
            awaited: whether the caller will wait for the handle at once.

        Raises:
            ArgumentError: the reduction does not support a type.
            HorovodInternalError: the runtime that the group belongs to has ended, or the job has failed.
            NotImplementedError: a callback whose calls cannot be named has called this.
        """
        membership = self.membership
        membership.check()
        origin = present_origin()
        described = tuple([(tensor.data_type, tensor.shape) for tensor in inputs or outputs])
        device = device_of(inputs or outputs)
        key = (operation, described, how, root, tuple(splits), device, caller())
        request = self._requests.get(key) if origin is None else None
        if request is None:
            name = None if origin is None else origin.next()
            request = self._make(operation, inputs or outputs, how, root, tuple(splits), device, name)
            if origin is None:
                if len(self._requests) >= _REMEMBERED:
                    self._requests.clear()
                self._requests[key] = request
        handle = submit(membership.number, request, inputs, outputs, allocate, awaited)
        if origin is None:
            self.calls.made += 1
        return handle

    def start_plain(
        self,
        what: str,
        operation: Operation,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        results: Sequence[torch.Tensor],
        options: Any,
        how: ReductionArguments = _MOVED,
        root: int = -1,
        splits: tuple[int, ...] = (),
        allocate: Allocate | None = None,
        finish: Finish | None = None,
    ) -> HorovodWork | None:
        """Submit a call with a plain tensor in host memory, on the shorter path. Call it directly in the operation's method.

        Args:
            what: the operation, for error messages.
            tensor: the tensor that the request describes, as one of ``shape``.
            inputs, outputs: the memory to read and to write.
            results: the tensors with the results for the caller.
            options: the options of the call.
            how, root, splits, allocate: as in :meth:`submit`.
            finish: copies the results to ``results``; None if the collective writes there.

        Returns:
            None inside a callback of a future; then nothing was submitted.

        Raises:
            as :meth:`submit`.
        """
        if present_origin() is not None:
            return None
        membership = self.membership
        membership.check()
        key = key_of(what, tensor, root, splits, caller(above=2))
        known = self._plain.get(key)
        if known is None or known[0] is not how:
            spec = TensorSpec("", DATA_TYPES[tensor.dtype], shape)
            if len(self._plain) >= _REMEMBERED:
                self._plain.clear()
            known = self._plain[key] = how, self._make(operation, [spec], how, root, splits, HOST, None)
        handle = submit_arrays(membership.number, known[1], inputs, outputs, allocate, is_awaited(options))
        self.calls.made += 1
        return self.work(handle, host_memory, results, what, finish, options)

    def _make(
        self,
        operation: Operation,
        tensors: Sequence[Tensor | TensorSpec],
        how: ReductionArguments,
        root: int,
        splits: tuple[int, ...],
        device: str,
        name: str | None,
    ) -> Request:
        """Make the request of a call. It has no number yet, so calls of one line with tensors of one kind share it."""
        if operation in (Operation.ALLREDUCE, Operation.REDUCESCATTER):
            named = [(PREFIX, tensor.data_type) for tensor in tensors]
            check_reduction(operation.name.capitalize(), named, how.op, how.prescale, how.postscale)
        root = root if root < 0 else self.membership.ranks[root]
        return make_request(operation, PREFIX, name, tensors, how.op, how.prescale, how.postscale, root, splits, device)

    def work(
        self,
        handle: Handle,
        memory: TorchMemory,
        outputs: Sequence[torch.Tensor],
        what: str,
        finish: Finish | None,
        options: Any,
    ) -> HorovodWork:
        """The return value of a call. Call this before the operation's method returns: the stack shows whether Python code has
        called the group."""
        follow = self._follow if self._names_callbacks and _is_called_by_python() else None
        return HorovodWork(handle, memory, outputs, what, finish, limit_of(options), follow)

    def _follow(self) -> Origin:
        """The origin for callbacks of the future of a call that is made now."""
        return Origin((present_origin() or self._futures).next())

    def reduce(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        how: ReductionArguments,
        options: Any,
        root: int = -1,
        results: Sequence[torch.Tensor] = (),
        finish: Finish | None = None,
    ) -> HorovodWork:
        """Reduce tensors in place, in one request.

        Args:
            root: the only rank of the group that gets the results; -1: all do.
            results: the tensors with the results for the caller, if they are others than ``tensors``.
            finish: copies the results to them.
        """
        sources = apart([flat(tensor, reduced=True) for tensor in tensors])
        targets = sources if root in (-1, self.index) else [torch.empty_like(source) for source in sources]
        memory = memory_of(sources, how)
        read, written = memory.reduce(sources, targets)
        awaited = is_awaited(options)
        handle = self.submit(Operation.ALLREDUCE, read, written, how=how, root=root, awaited=awaited)
        if targets is sources:
            finish = both(writes_back(tensors, sources), finish)
        return self.work(handle, memory, results or tensors, what, finish, options)

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
        memory = memory_of(sources)
        results = Results(memory, sources, targets)
        handle = self.submit(
            Operation.ALLGATHER, memory.read(sources), allocate=results.allocate, awaited=is_awaited(options)
        )
        return self.work(handle, memory, outputs, what, both(results.finish, finish), options)

    def exchange(
        self,
        what: str,
        source: torch.Tensor,
        splits: Sequence[int],
        target: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        options: Any,
        finish: Finish | None = None,
        root: int = -1,
        received: Sequence[int] = (),
    ) -> HorovodWork:
        """Send ``splits[r]`` elements of the flat ``source`` to each rank r; those received fill the flat ``target``.

        Args:
            outputs: the tensors with the results for the caller.
            finish: copies the results from ``target`` to ``outputs``; None if they share memory.
            root: see :meth:`submit`.
            received: the number of elements that this rank expects from each; empty: any.
        """
        memory = memory_of([source])
        results = Results(memory, [source], [target])
        handle = self.submit(
            Operation.ALLTOALL,
            memory.read([source]),
            allocate=results.allocate,
            splits=splits,
            root=root,
            awaited=is_awaited(options),
        )
        finish = both(results.finish, finish)
        return self.work(handle, memory, outputs, what, both(expects(what, received), finish), options)


_CALLER = dist.distributed_c10d.__file__


def _is_called_by_python() -> bool:
    """Whether Python code of ``torch.distributed`` has called the group. Otherwise C++ code has, or the script directly."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename == _CALLER


def both(first: Finish | None, second: Finish | None) -> Finish | None:
    if first is None or second is None:
        return first or second

    def finish(handle: Handle) -> None:
        first(handle)
        second(handle)

    return finish
