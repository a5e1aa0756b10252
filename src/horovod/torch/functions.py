"""Bringing all ranks to one state: parameters, optimizer state, and any picklable object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horovod.common.objects import allgather_object, broadcast_object
from horovod.torch.broadcast import broadcast_async_
from horovod.torch.compression_memory import for_all_ranks
from horovod.torch.handles import synchronize
from horovod.torch.mpi_ops import rank

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors on every rank with those of rank ``root_rank``, in place. Every rank must call it.

    Args:
        params: a ``state_dict()``, or a list of tensors or of ``(name, tensor)`` pairs, the same on every rank.
        root_rank: whose values count.

    Raises:
        ValueError: ``params`` is something else (a generator such as ``model.named_parameters()``: make it a list).
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [pair if isinstance(pair, tuple) else (str(number), pair) for number, pair in enumerate(params)]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}; pass a dict, or a list of tensors or (name, tensor) pairs"
        )
    pending = []
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is no tensor but of type {type(tensor).__name__}")
        target = tensor.detach()
        staged = target if target.is_contiguous() else target.contiguous()
        pending.append((broadcast_async_(staged, root_rank, f"parameter.{name}"), target, staged))
    for handle, target, staged in pending:
        synchronize(handle)
        if staged is not target:
            target.copy_(staged)


class _Slot:
    """Stands in a pickled state dictionary for a tensor that is broadcast by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Make every rank's optimizer equal to that of rank ``root_rank``: hyper-parameters and state. Every rank calls it.

    Ranks may have state or none: what the root has is what all have afterwards. State travels through host memory, so ranks
    may keep it on devices of any kind and number; it ends up where each rank's parameters are.

    Args:
        model: accepted for compatibility.

    Raises:
        ValueError: the optimizer is ``torch.optim.LBFGS``, whose state is not tied to parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors: list[torch.Tensor] = []

    def strip(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return _Slot(value)
        if isinstance(value, dict):
            return {key: strip(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(strip(each) for each in value)
        return value

    skeleton = strip(for_all_ranks(optimizer.state_dict())) if rank() == root_rank else None
    skeleton = broadcast_object(skeleton, root_rank, name="optimizer_state")
    if rank() != root_rank:

        def restore(value: Any) -> Any:
            if isinstance(value, _Slot):
                tensors.append(torch.empty(value.shape, dtype=value.dtype))
                return tensors[-1]
            if isinstance(value, dict):
                return {key: restore(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(restore(each) for each in value)
            return value

        skeleton = restore(skeleton)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{number}") for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if rank() != root_rank:
        optimizer.load_state_dict(skeleton)
