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


def _references(tensor: torch.Tensor) -> int:
    """The number of references to the tensor's memory, by tensors and by this function."""
    assert _count is not None
    return _count(tensor.untyped_storage()._cdata)


_ALONE = _references(torch.empty(1)) if AVAILABLE else 0


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor refers to the memory of a dense tensor. True if this PyTorch does not count."""
    return _count is None or _count(tensor.untyped_storage()._cdata) == _ALONE
