"""A shorter path to the core for calls with plain tensors in host memory.

It makes the same requests as the general path (:mod:`horovod.torch.distributed.submission`), so ranks may take different paths
for one collective. It exists because the steps in Python take most of the time of a small collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.comm.shm import huge_pages
from horovod.comm.spans import address_of
from horovod.core.requests.tensor import Allocate
from horovod.torch.tensors import DATA_TYPES, flat_array

_TYPES = frozenset(each for each in DATA_TYPES if not each.is_complex)
_CLASSES = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def elements_of(tensor: torch.Tensor) -> Array | None:
    """A flat view of the tensor's own memory; None if the tensor is not plain (contiguous, dense, of a type that the core
    supports, of no other subclass of Tensor than Parameter) or not in host memory."""
    if (
        tensor.__class__ not in _CLASSES
        or not tensor.is_cpu
        or tensor.dtype not in _TYPES
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
    ):
        return None
    try:
        return flat_array(tensor)
    except (RuntimeError, ValueError):  # lazily negated: checking beforehand would take longer
        return None


SMALL_BYTES = 64 << 10
"""Lists of tensors of at most this size in all take the shorter path. For larger ones it saves nothing."""


def arrays_in(tensors: Sequence[torch.Tensor]) -> list[Array] | None:
    """:func:`elements_of` each tensor; None if one is not plain, or if they are not small together."""
    found = []
    left = SMALL_BYTES
    for tensor in tensors:
        elements = elements_of(tensor)
        if elements is None or (left := left - elements.nbytes) < 0:
            return None
        found.append(elements)
    return found


def joined(arrays: Sequence[Array], like: Array) -> Array:
    """All arrays as one; without arrays an empty one, of the type of ``like``."""
    return np.concatenate(arrays) if arrays else like[:0]


def divided(parts: Sequence[Array], like: Array) -> tuple[Array, Callable[[Any], None]]:
    """New memory for flat results, and a function that copies them from there to ``parts``."""
    target = np.empty(sum(part.size for part in parts), like.dtype)

    def finish(_: Any) -> None:
        start = 0
        for part in parts:
            part[:] = target[start : start + part.size]
            start += part.size

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


Key = tuple[Any, ...]


def key_of(what: str, tensor: torch.Tensor, root: int, splits: Sequence[int], line: str) -> Key:
    """The key under which calls share a request. It does not contain the reduction, which is compared separately."""
    return what, tensor.dtype, tensor.shape, root, splits, line
