"""Calls with plain tensors in host memory, which go to the core in fewer steps than others.

They do the same as calls that take all steps (:mod:`horovod.torch.distributed.submission`), and make the same requests, so one
rank may go this way and another not. The steps in Python take most of the time of a small collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.comm.datatypes import Array
from horovod.comm.shm import huge_pages
from horovod.comm.spans import address_of
from horovod.core.requests.tensor import Allocate
from horovod.torch.ops.tensors import DATA_TYPES, flat_array

_TYPES = frozenset(each for each in DATA_TYPES if not each.is_complex)
_CLASSES = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def elements_of(tensor: torch.Tensor) -> Array | None:
    """The elements in the tensor's own memory, in one dimension; None where the tensor is not plain or not in host memory."""
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
    except (RuntimeError, ValueError):  # lazily negated: to ask beforehand takes longer
        return None


def results_into(target: Array, row_elements: int = 1) -> Allocate:
    """Results of an allgather or alltoall go to ``target``.

    Args:
        row_elements: how many elements a row of the request has.
    """

    def allocate(index: int, rows: int) -> Array:
        check_room(rows * row_elements, target.size)
        return room_in(target)

    return allocate


def check_room(elements: int, room: int) -> None:
    """Raises ValueError if the ranks send more or less than the output has room for."""
    if elements != room:
        raise ValueError(f"the ranks send {elements} elements, and the output has room for {room}")


def room_in(target: Array) -> Array:
    """``target``, an output that is about to be filled. It is often new, so a large one asks for huge pages, as results do."""
    if target.nbytes >= huge_pages.LEAST_BYTES:
        huge_pages.prefer_huge(address_of(target), target.nbytes)
    return target


Key = tuple[Any, ...]


def key_of(what: str, tensor: torch.Tensor, root: int, splits: Sequence[int], line: str) -> Key:
    """Shared by calls with the same request, apart from the reduction."""
    return what, tensor.dtype, tensor.shape, root, splits, line
