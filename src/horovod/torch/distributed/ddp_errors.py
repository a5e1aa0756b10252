"""Raises the errors of PyTorch's own reducer, with its text, for passes that are reduced in place.

PyTorch writes these texts in C++, and they differ from version to version. So the same thing is done again with a reducer of
PyTorch that has as many parameters, of one element each. It has all of them in one bucket, and sends nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_c10d: Any = dist  # its stubs lack names
_Reducer: Any = _c10d.Reducer


def refuse_another(index: int, count: int, names: Mapping[int, str], group: Any) -> NoReturn:
    """Raise the error for a parameter whose gradient has come a second time in one pass.

    Args:
        index: the number of the parameter.
        count: how many parameters there are.
        names: the names of parameters, by number, as DDP passes them to its reducer.
        group: the process group.
    """
    reducer = _reducer([_parameter(torch.float32) for _ in range(max(count, 2))], names, group)
    for _ in range(2):
        reducer._autograd_hook(index)
    raise RuntimeError(f"The gradient of parameter {index} has come twice in one pass.")


def refuse_unfinished(ready: Sequence[int], count: int, names: Mapping[int, str], group: Any) -> NoReturn:
    """Raise the error for a pass that has not reached all parameters, or has not ended.

    Args:
        ready: the numbers of the parameters that the pass has reached.
    """
    reducer = _reducer([_parameter(torch.float32) for _ in range(count)], names, group)
    for index in ready:
        try:
            reducer._autograd_hook(index)
        except RuntimeError:  # the last one would be sent
            pass
    reducer._rebuild_buckets()
    raise RuntimeError("The last backward pass has not reached all parameters.")


def refuse_gradient(gradient: torch.Tensor, dtype: torch.dtype, group: Any) -> NoReturn:
    """Raise the error for a gradient of another type, layout or number of elements than its parameter had at first.

    Args:
        dtype: the type of the parameter when DDP was made.
    """
    parameter = _parameter(dtype)
    reducer = _reducer([parameter, _parameter(dtype)], {0: "a", 1: "b"}, group)
    found = torch.zeros(2, dtype=gradient.dtype)
    parameter.data = found
    parameter.grad = found if gradient.layout is torch.strided else found.to_sparse()
    reducer._autograd_hook(0)
    raise RuntimeError(
        f"DDP got a gradient of {gradient.dtype}, {gradient.layout}, for a parameter that was of {dtype} when DDP was made."
    )


def _parameter(dtype: torch.dtype) -> torch.Tensor:
    parameter = torch.zeros(1, dtype=dtype, requires_grad=True)
    parameter.grad = torch.zeros(1, dtype=dtype)
    return parameter


def _reducer(parameters: list[torch.Tensor], names: Mapping[int, str], group: Any) -> Any:
    """A reducer of PyTorch for these parameters, in one bucket, that expects gradients."""
    alone = _c10d.ProcessGroup(group.rank(), group.size())
    rest = (alone, [False] * len(parameters), sys.maxsize, False, False, dict(names))
    reducer = _Reducer(parameters, [[*range(len(parameters))]], [sys.maxsize], *rest)
    reducer.prepare_for_backward([])
    return reducer
