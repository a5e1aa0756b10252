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
ALONE_IN_HOOKS = AVAILABLE and torch.__version__ >= "2.8"
"""Whether a gradient that nothing else uses counts as alone in its hook. Backward still refers to it before PyTorch 2.8."""


def _counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor, how often its memory is referred to. It reads storages by address: the caller holds the tensors."""
    assert _count is not None
    return [*map(_count, map(_ADDRESS, map(_STORAGE, tensors)))]


_ALONE = _counts([torch.empty(1)])[0] if AVAILABLE else 0
"""The count of a tensor's memory to which nothing else refers."""


def are_alone(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no other tensor refers to the memory of these dense tensors. True if this PyTorch does not count."""
    return not AVAILABLE or _counts(tensors).count(_ALONE) == len(tensors)


def is_alone(tensor: torch.Tensor) -> bool:
    """:func:`are_alone` of one tensor."""
    return are_alone((tensor,))
