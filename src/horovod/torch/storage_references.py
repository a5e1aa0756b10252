"""Whether a tensor's memory has other users: a reduction in place must not change what something else still reads.

Backward keeps the tensor that it has computed as a parameter's gradient. This may be a view of a tensor that other operations
of backward still read, or that is also the gradient of another parameter. PyTorch counts the references to memory, and so does
it before it adds to a tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller

import torch

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_STORAGE, _ADDRESS = methodcaller("untyped_storage"), attrgetter("_cdata")

AVAILABLE = _count is not None
"""Whether this PyTorch counts references to memory for Python code."""


_ALONE = 0 if _count is None else next(map(_count, map(_ADDRESS, map(_STORAGE, [torch.empty(1)]))))
"""The count of a tensor's memory to which nothing else refers."""


def are_alone(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no other tensor refers to the memory of these dense tensors. True if this PyTorch does not count."""
    if _count is None:
        return True
    counts = [*map(_count, map(_ADDRESS, map(_STORAGE, tensors)))]  # by address: the caller holds the tensors
    return counts.count(_ALONE) == len(counts)


def is_alone(tensor: torch.Tensor) -> bool:
    """:func:`are_alone` of one tensor."""
    return are_alone((tensor,))
