"""Flat tensors: what the core reads and writes of the caller's tensors, and how results get to the caller's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from horovod.core.errors import MismatchError
from horovod.core.requests.handle import Handle
from horovod.torch.device.base import TorchMemory
from horovod.torch.device.memory import host_memory
from horovod.torch.distributed.arguments import ArgumentError
from horovod.torch.distributed.plain import check_room, room_in
from horovod.torch.distributed.work import Finish
from horovod.torch.tensors import DATA_TYPES, flat_array, plain

_WHERE = "torch.distributed"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size in bytes, the type as which elements of other types are sent. They cannot be reduced."""


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


def expects(what: str, received: Sequence[int]) -> Finish | None:
    """A function that raises MismatchError if an alltoall has brought other numbers of elements from the ranks."""
    if not received:
        return None

    def check(handle: Handle) -> None:
        for rank, (got, room) in enumerate(zip(handle.result, received, strict=True)):
            if got != room:
                text = (
                    f"{what}: rank {rank} of the group sent {got} elements, and the output has room for {room} from it"
                )
                raise MismatchError(text, reason=text)

    return check
