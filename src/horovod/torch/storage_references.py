"""Whether a tensor's memory has other users: a reduction in place must not change what something else still reads.

Backward keeps the tensor that it has computed as a parameter's gradient. This may be a view of a tensor that other operations
of backward still read, or that is also the gradient of another parameter. PyTorch counts the references to memory, and so does
it before it adds to a tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

AVAILABLE = _count is not None
"""Whether this PyTorch counts references to memory for Python code."""


_ALONE = 0 if _count is None else _count(torch.empty(1).untyped_storage()._cdata)
"""The count of a tensor's memory to which nothing else refers."""


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor refers to the memory of a dense tensor. True if this PyTorch does not count."""
    return _count is None or _count(tensor.untyped_storage()._cdata) == _ALONE
