"""Flat tensors: what the core reads and writes of the caller's tensors, and how results get to the caller's tensors.

A plain tensor (dense, contiguous, of a type that the core supports) in host memory is passed as it lies there
(:func:`~horovod.torch.tensors.plain_view`). Other tensors are flattened, copied or staged first (:func:`flat`). Both make the
same requests, so ranks may differ in this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.comm.shm import huge_pages
from horovod.comm.spans import address_of
from horovod.core.requests.batch import check_received
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import host_memory
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.work import Finish
from horovod.torch.tensors import DATA_TYPES, flat_array, plain, plain_view

_WHERE = "torch.distributed"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size in bytes, the type as which elements of other types are sent. They cannot be reduced."""

SMALL_BYTES = 64 << 10
"""Lists of tensors of at most this size in all are passed as they lie in host memory. For larger ones it saves nothing."""


def plain_views(tensors: Sequence[torch.Tensor]) -> list[Tensor] | None:
    """:func:`~horovod.torch.tensors.plain_view` of each tensor; None if one is not plain."""
    found = []
    for tensor in tensors:
        view = plain_view(tensor)
        if view is None:
            return None
        found.append(view)
    return found


def small_views(tensors: Sequence[torch.Tensor]) -> list[Tensor] | None:
    """:func:`~horovod.torch.tensors.plain_view` of each tensor; None if one is not plain, or if they are not small together."""
    found = []
    left = SMALL_BYTES
    for tensor in tensors:
        view = plain_view(tensor)
        if view is None or (left := left - view.array.nbytes) < 0:
            return None
        found.append(view)
    return found


def scratch_like(view: Tensor) -> Tensor:
    """New memory for a result that this rank does not need."""
    return Tensor(np.empty_like(view.array), view.data_type, view.shape)


def together(parts: Sequence[Tensor]) -> Tensor:
    """One flat tensor of the size of all parts, for a request. Its elements are not those of the parts."""
    first = parts[0]
    return first if len(parts) == 1 else Tensor(first.array, first.data_type, (sum([part.shape[0] for part in parts]),))


def divided(parts: Sequence[Tensor], like: Tensor) -> tuple[Array, Finish]:
    """New memory for flat results, and a function that copies them from there to ``parts``."""
    target = np.empty(sum(part.array.size for part in parts), like.array.dtype)

    def finish(_: Any) -> None:
        start = 0
        for part in parts:
            part.array[:] = target[start : start + part.array.size]
            start += part.array.size

    return target, finish


def results_into(target: Array, row_elements: int = 1) -> Allocate:
    """A function that provides ``target`` as the output of an allgather or alltoall. It raises ValueError if the size differs.

    Args:
        target: the flat output.
        row_elements: the number of elements of one row of the request.
    """

    def allocate(index: int, rows: int) -> Array:
        check_room(rows * row_elements, target.size)
        return room_in(target)

    return allocate


def results_into_each(targets: Sequence[Tensor]) -> Allocate:
    """A function that provides the output of an alltoall: one flat tensor, as :func:`results_into`, or one for each rank. The
    core checks their sizes."""
    if len(targets) == 1:
        return results_into(targets[0].array)
    return lambda index, rows: [room_in(target.array) for target in targets]


def check_room(elements: int, room: int) -> None:
    """Raise ValueError if the ranks send more or fewer elements than the output has room for."""
    if elements != room:
        raise ValueError(f"the ranks send {elements} elements, and the output has room for {room}")


def room_in(target: Array) -> Array:
    """Return ``target``, an output that is about to be filled. It is often new memory, so huge pages are requested if it is
    large, as for results that the core allocates."""
    if target.nbytes >= huge_pages.LEAST_BYTES:
        huge_pages.prefer_huge(address_of(target), target.nbytes)
    return target


def flat(tensor: torch.Tensor, reduced: bool = False) -> torch.Tensor:
    """A tensor in one dimension: a view of its memory if it is contiguous and not lazily conjugated or negated, else a copy.

    Args:
        reduced: whether the elements will be reduced. If not, elements of a type that the core does not support are viewed as
            integers of the same size.

    Raises:
        ArgumentError: the tensor is sparse, or of a type that cannot be communicated.
    """
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{_WHERE}: a tensor of layout {tensor.layout} cannot be communicated here; make it dense")
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = plain(tensor)
    tensor = tensor.view(-1)
    if tensor.numel() == 1:  # its stride may be any number
        tensor = tensor.as_strided((1,), (1,))
    if tensor.dtype not in DATA_TYPES:
        bits = _BITS.get(tensor.dtype.itemsize)
        if reduced or bits is None:
            raise ArgumentError(
                f"{_WHERE}: elements of type {tensor.dtype} cannot be {'reduced' if reduced else 'sent'}"
            )
        tensor = tensor.view(bits)
    return tensor


def as_flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """All tensors as one flat tensor, see :func:`flat`. Without tensors it is empty, of the type of ``like``."""
    parts = [flat(tensor) for tensor in tensors]
    if not parts:
        return flat(like)[:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def apart(targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors to write at the same time: ``targets``, with copies of those that share memory with an earlier one."""
    if len(targets) < 2:
        return list(targets)
    found, end = list(targets), 0
    for index in sorted(range(len(targets)), key=lambda index: targets[index].data_ptr()):
        target = targets[index]
        if target.data_ptr() < end and target.numel():
            found[index] = target.clone()
        end = max(end, target.data_ptr() + target.nbytes)
    return found


def writes_back(targets: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Finish | None:
    """A function that copies the flat results ``parts`` to ``targets``; None if all share their memory already."""
    copies = [
        (target, part) for target, part in zip(targets, parts, strict=True) if target.data_ptr() != part.data_ptr()
    ]
    if not copies:
        return None

    def finish(_: Handle) -> None:
        for target, part in copies:
            target.copy_(part.view(target.dtype).view(target.shape))

    return finish


def overlapping(
    inputs: Sequence[torch.Tensor],
    sent: Sequence[int],
    outputs: Sequence[torch.Tensor],
    received: Sequence[int],
    index: int,
) -> bool:
    """Whether an output of an alltoall shares memory with an input or with another output. What a rank sends to itself may lie
    where it belongs already.

    Args:
        inputs, outputs: contiguous tensors: one for each rank, or one for all ranks, or none.
        sent, received: by rank, the number of elements to it and from it.
        index: this rank's number in the group.
    """
    # Of each rank's elements: the begin, the end, and whether they are written.
    places: list[tuple[int, int, bool]] = []
    for tensors, counts, writes in ((inputs, sent, False), (outputs, received, True)):
        if len(tensors) == 1:
            begin, itemsize = tensors[0].data_ptr(), tensors[0].itemsize
            for count in counts:
                end = begin + count * itemsize
                places.append((begin, end, writes))
                begin = end
        else:
            for tensor in tensors:
                begin = tensor.data_ptr()
                places.append((begin, begin + tensor.nbytes, writes))
    if inputs and outputs and places[index][:2] == places[len(sent) + index][:2]:
        del places[index]
    places.sort()
    last = last_written = 0  # the ends of all that begin before
    for begin, end, writes in places:
        if begin < end:
            if begin < (last if writes else last_written):
                return True
            last = max(last, end)
            last_written = max(last_written, end) if writes else last_written
    return False


class Results:
    """The memory for the results of an allgather or alltoall, whose sizes are known only once the ranks have agreed.

    In host memory the collective writes to ``targets``. For a device it makes new tensors, which are then copied to
    ``targets``.

    Args:
        memory: the memory of the collective.
        sources: the inputs of the collective.
        targets: flat tensors, one for each result.
    """

    def __init__(self, memory: TorchMemory, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._sources = sources
        self._targets = targets
        self._grown: dict[int, torch.Tensor] = {}
        self._grow = None if memory is host_memory else memory.grow(sources, self._grown)

    def allocate(self, index: int, rows: int) -> Any:
        """The :data:`horovod.core.requests.tensor.Allocate` of the collective.

        Raises:
            ArgumentError: the target has another size.
        """
        target = self._targets[index]
        elements = rows * math.prod(self._sources[index].shape[1:])
        check_room(elements, target.numel())
        return room_in(flat_array(target)) if self._grow is None else self._grow(index, rows)

    @property
    def finish(self) -> Finish | None:
        """A function that copies new tensors to the targets; None if the collective writes to the targets."""
        return None if self._grow is None else self._copy

    def _copy(self, _: Handle) -> None:
        for index, grown in self._grown.items():
            self._targets[index].copy_(grown.view(-1))


def expects(what: str, received: Sequence[int]) -> Finish:
    """A function that raises MismatchError if an alltoall has brought other numbers of elements from the ranks."""
    return lambda handle: check_received(what, handle.result, received)
