"""Bringing all ranks to one state: parameters, optimizer state, and any picklable object."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch

from horovod.core.process_set import ProcessSet, global_process_set
from horovod.torch.allgather import allgather_async
from horovod.torch.broadcast import broadcast_, broadcast_async_
from horovod.torch.handles import synchronize
from horovod.torch.mpi_ops import rank


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

    Ranks may have state or none: what the root has is what all have afterwards.

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
            tensors.append(value.detach().contiguous())
            return _Slot(value)
        if isinstance(value, dict):
            return {key: strip(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(strip(each) for each in value)
        return value

    skeleton = strip(optimizer.state_dict()) if rank() == root_rank else None
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


def _to_bytes(obj: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank ``root_rank``'s object on every member of ``process_set``, which must all call it.

    Args:
        obj: anything cloudpickle takes; only the root's matters.
        root_rank: a global rank of the set.
        name: identifies the call; the default is the same for all objects, so calls must come in the same order everywhere.

    Returns:
        On the root ``obj`` itself, elsewhere a copy.
    """
    name = name or "object"
    length = torch.zeros(1, dtype=torch.int64)
    data = None
    if rank() == root_rank:
        data = _to_bytes(obj)
        length[0] = data.numel()
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if data is None:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every member's object, in rank order. Every member must call it.

    Args:
        obj: anything cloudpickle takes.
        name: identifies the call, as in :func:`broadcast_object`.
    """
    name = name or "object"
    data = _to_bytes(obj)
    lengths_handle = allgather_async(torch.tensor([data.numel()], dtype=torch.int64), f"{name}.sz", process_set)
    data_handle = allgather_async(data, f"{name}.t", process_set)
    lengths, everything = synchronize(lengths_handle).tolist(), synchronize(data_handle).numpy()
    objects, start = [], 0
    for length in lengths:
        objects.append(cloudpickle.loads(everything[start : start + length].tobytes()))
        start += length
    return objects
