"""Makes requests from the tensors that PyTorch passes to a group, and submits them to the group's process set."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.common.reductions import ReductionArguments
from horovod.core.negotiation.messages import HOST, Operation, Request, TensorSpec
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission.prepared import device_of, submit, submit_arrays
from horovod.core.submission.requests import check_reduction, make_request
from horovod.observe.call_site import caller
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import host_memory, memory_of
from horovod.torch.distributed.futures import Origin, present_origin
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.plain import Key, check_room, key_of, room_in
from horovod.torch.distributed.work import Finish, HorovodWork
from horovod.torch.ops.tensors import DATA_TYPES, flat_array, plain

PREFIX = "torch.distributed"
"""In the names of all calls of a group: they are counted together, so every rank must call the same operations in one order."""

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
"""Of a collective that reduces nothing."""
_REMEMBERED = 1024
"""How many requests a group keeps."""
_FOLDER = str(Path(__file__).parent)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The substitutes, by size, for types of elements that the core does not know; they cannot be reduced."""


def checked_reduction(op: Any) -> ReductionArguments:
    """How ``op`` reduces, a ``torch.distributed.ReduceOp`` or a member of it.

    Raises:
        ValueError: the core has no such reduction.
    """
    kind = getattr(op, "op", op)
    known = _REDUCING.get(kind)
    if known is not None:
        return known
    if kind.name == "PREMUL_SUM":
        factor = op.factor
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ValueError("the factor of ReduceOp.PREMUL_SUM must be one number, not a tensor of several")
        return ReductionArguments(ReduceOp.SUM, prescale=float(factor))
    found = _OPERATIONS.get(kind.name)
    if found is None:
        raise ValueError(f"ReduceOp.{kind.name} is not supported; use one of {', '.join(_OPERATIONS)} and PREMUL_SUM")
    known = _REDUCING[kind] = ReductionArguments(found)
    return known


_REDUCING: dict[Any, ReductionArguments] = {}


def limit_of(options: Any) -> float:
    """The time limit in the options of a call, in seconds; -1 if there is none."""
    timeout = getattr(options, "timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) and timeout > _NO_LIMIT else -1


def is_awaited(options: Any) -> bool:
    """Whether the caller waits for the operation next."""
    return not getattr(options, "asyncOp", True)


def flat(tensor: torch.Tensor, reduced: bool = False) -> torch.Tensor:
    """The elements of a tensor in one dimension: its own memory if it is contiguous, else a copy.

    Args:
        reduced: they are to be reduced; otherwise types that the core does not know travel as their bits.

    Raises:
        ValueError: the tensor is sparse, or of a type that cannot be communicated.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{PREFIX}: a tensor of layout {tensor.layout} cannot be communicated here; make it dense")
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = plain(tensor)
    tensor = tensor.view(-1)
    if tensor.dtype not in DATA_TYPES:
        bits = _BITS.get(tensor.dtype.itemsize)
        if reduced or bits is None:
            raise ValueError(f"{PREFIX}: elements of type {tensor.dtype} cannot be {'reduced' if reduced else 'sent'}")
        tensor = tensor.view(bits)
    return tensor


def as_flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The elements of all tensors, one after another, as :func:`flat` has them; of the type of ``like`` if there are none."""
    parts = [flat(tensor) for tensor in tensors]
    if not parts:
        return flat(like)[:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def writes_back(targets: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Finish | None:
    """A function that copies flat results to the tensors; None if they are there already."""
    copies = [
        (target, part) for target, part in zip(targets, parts, strict=True) if target.data_ptr() != part.data_ptr()
    ]
    if not copies:
        return None

    def finish(_: Handle) -> None:
        for target, part in copies:
            target.copy_(part.view(target.dtype).view(target.shape))

    return finish


class Results:
    """The memory for the results of an allgather or alltoall, whose sizes the ranks' decision determines. In host memory the
    results go to the existing flat tensors. On a device the collective makes new ones, which are copied.

    Args:
        memory: the memory of the collective.
        sources: its inputs.
        targets: flat tensors, one for each result.
    """

    def __init__(self, memory: TorchMemory, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._sources = sources
        self._targets = targets
        self._grown: dict[int, torch.Tensor] = {}
        self._grow = None if memory is host_memory else memory.grow(sources, self._grown)

    def allocate(self, index: int, rows: int) -> Any:
        """See :data:`horovod.core.requests.tensor.Allocate`."""
        target = self._targets[index]
        elements = rows * math.prod(self._sources[index].shape[1:])
        check_room(elements, target.numel())
        return room_in(flat_array(target)) if self._grow is None else self._grow(index, rows)

    @property
    def finish(self) -> Finish | None:
        """Copies what is made on a device; None where nothing is."""
        return None if self._grow is None else self._copy

    def _copy(self, _: Handle) -> None:
        for index, grown in self._grown.items():
            self._targets[index].copy_(grown.view(-1))


class Submitter:
    """Submits the calls of one group.

    Args:
        membership: the membership of the group.
        seconds: the time limit of sends and receives; that of collectives ends the job.
        names_callbacks: Python code gets the futures that are made here, so what their callbacks call is named after them.
            Elsewhere such calls are errors.
    """

    def __init__(self, membership: GroupMembership, seconds: float, names_callbacks: bool = True) -> None:
        self.membership = membership
        self.seconds = seconds
        self._names_callbacks = names_callbacks
        self.size = len(membership.ranks)
        self.index = membership.worker.index
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
        """Submit one collective.

        Args:
            root: the rank in the group that receives or sends the data; -1 if there is none. All ranks must agree.

        Raises:
            ValueError: the reduction has no meaning for a type.
            HorovodInternalError: the runtime that the group belongs to has ended, or the job has failed.
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
        return submit(membership.number, request, inputs, outputs, allocate, awaited)

    def start_plain(
        self,
        what: str,
        operation: Operation,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        result: torch.Tensor,
        options: Any,
        how: ReductionArguments = _MOVED,
        root: int = -1,
        splits: tuple[int, ...] = (),
        allocate: Allocate | None = None,
    ) -> HorovodWork | None:
        """Submit the call of a plain tensor in host memory in few steps; None, and nothing has happened, inside a callback.

        Args:
            tensor: what the request describes, as of ``shape``.
            inputs, outputs: the elements of ``tensor`` or of ``result``.
            result: the tensor in which the caller finds the results.

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
        return self.work(handle, host_memory, [result], what, None, options)

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
        """The request of a call, before it is counted. Calls of one line with tensors of one kind have the same."""
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
        """The call's return value for PyTorch. It must be two frames below the call, which shows whether Python code has made
        it."""
        follow = self._follow if self._names_callbacks and _is_called_by_python() else None
        return HorovodWork(handle, memory, outputs, what, finish, limit_of(options), follow)

    def _follow(self) -> Origin:
        """The origin of what follows a future of a call that is made now."""
        return Origin((present_origin() or self._futures).next())

    def reduce(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        how: ReductionArguments,
        options: Any,
        root: int = -1,
    ) -> HorovodWork:
        """Reduce tensors in place, in one request; ``root``: only there."""
        sources = [flat(tensor, reduced=True) for tensor in tensors]
        targets = sources if root in (-1, self.index) else [torch.empty_like(source) for source in sources]
        memory = memory_of(sources, how)
        read, written = memory.reduce(sources, targets)
        awaited = is_awaited(options)
        handle = self.submit(Operation.ALLREDUCE, read, written, how=how, root=root, awaited=awaited)
        finish = writes_back(tensors, sources) if targets is sources else None
        return self.work(handle, memory, tensors, what, finish, options)

    def gather(
        self,
        what: str,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: Any,
        finish: Finish | None = None,
    ) -> HorovodWork:
        """Concatenate each input of all ranks in the flat tensor ``targets[i]``."""
        sources = [flat(tensor) for tensor in inputs]
        memory = memory_of(sources)
        results = Results(memory, sources, targets)
        handle = self.submit(
            Operation.ALLGATHER, memory.read(sources), allocate=results.allocate, awaited=is_awaited(options)
        )
        return self.work(handle, memory, outputs, what, _both(results.finish, finish), options)

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
    ) -> HorovodWork:
        """Send ``splits[r]`` rows of ``source`` to each rank r; what arrives fills the flat tensor ``target``."""
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
        return self.work(handle, memory, outputs, what, _both(results.finish, finish), options)


_CALLER = dist.distributed_c10d.__file__


def _is_called_by_python() -> bool:
    """Whether a function of ``torch.distributed`` has called the group. Otherwise C++ has, or a script that knows the group."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename == _CALLER


def _both(first: Finish | None, second: Finish | None) -> Finish | None:
    if first is None or second is None:
        return first or second

    def finish(handle: Handle) -> None:
        first(handle)
        second(handle)

    return finish
