"""Broadcasts of parameters, optimizer state and picklable objects, and all-gathers of objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from horovod._bindings.objects import allgather_made, allgather_object, broadcast_made, broadcast_object
from horovod.comparison.samples import parameters_are_replaced
from horovod.core.lifecycle.context import keeps_own
from horovod.core.negotiation.agreement import list_ranks
from horovod.core.submission.arguments import full_name, whole_number
from horovod.torch.mpi_ops import rank, size
from horovod.torch.ops.broadcast import broadcast_async_
from horovod.torch.ops.handles import synchronize
from horovod.torch.optimizer.compressor_state import for_all_ranks
from horovod.torch.tensors import check_kind, plain
from horovod.torch.uncompiled import share_uncompiled, uncompiled

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

share_uncompiled(globals(), allgather_object, broadcast_object)


@uncompiled
def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors on every rank with those of rank ``root_rank``, in place. Every rank must call it.

    The ranks first exchange the names of their tensors, so that a wrong argument on one rank is an error on all ranks.
    In a process that joins a running elastic job it does nothing before ``hvd.elastic.run``.

    Args:
        params: a ``state_dict()``, or a list of tensors or of ``(name, tensor)`` pairs, the same on every rank.
        root_rank: the rank whose values are used.

    Raises:
        ValueError: ``params`` is something else, for example a generator such as ``model.named_parameters()``, or contains
            something that cannot be broadcast, such as a DTensor. The ranks have tensors of different names. Elements of a
            tensor share memory, as after ``expand()``, and the root has different values for them.
        RuntimeError: another rank has raised one of these errors. The text says which.
    """
    if keeps_own("hvd.broadcast_parameters()"):
        _named(params, root_rank)
        return
    named: list[tuple[str, torch.Tensor]] = []

    def prepare() -> str:
        named.extend(_named(params, root_rank))
        return hashlib.sha256(repr([name for name, _ in named]).encode()).hexdigest()

    if len(set(allgather_made(prepare, "broadcast_parameters", what="broadcast_parameters"))) > 1:
        names = [set(each) for each in allgather_object([name for name, _ in named], "broadcast_parameters.names")]
        _raise_different(names)
    staged = [plain(tensor) for _, tensor in named]
    handles = [
        broadcast_async_(each, root_rank, f"parameter.{name}") for (name, _), each in zip(named, staged, strict=True)
    ]
    for handle in handles:
        synchronize(handle)
    for (name, tensor), each in zip(named, staged, strict=True):
        if each is not tensor:
            _write(each, tensor, name)
    parameters_are_replaced()


def _named(params: Any, root_rank: int) -> list[tuple[str, torch.Tensor]]:
    """The parameters with their names, detached. Raises as :func:`broadcast_parameters`."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, list):
        pairs = [pair if isinstance(pair, tuple) else (str(number), pair) for number, pair in enumerate(params)]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}; pass a dict, or a list of tensors or (name, tensor) pairs"
        )
    root = whole_number(root_rank, "root_rank")
    if not 0 <= root < size():
        raise ValueError(f"broadcast_parameters received invalid root rank {root}; the job has {size()} ranks")
    named = []
    for name, tensor in pairs:
        if tensor is None:
            continue
        full_name("parameter", str(name))
        try:
            check_kind(tensor)
        except ValueError as error:
            raise ValueError(f"broadcast_parameters: {name!r}: {error}") from None
        named.append((str(name), tensor.detach()))
    return named


def _raise_different(names: list[set[str]]) -> NoReturn:
    """Raise an error that says which tensor is missing on which ranks."""
    for name in sorted(set().union(*names)):
        having = [number for number, each in enumerate(names) if name in each]
        if len(having) < len(names):
            missing = [number for number, each in enumerate(names) if name not in each]
            raise ValueError(
                f"broadcast_parameters: the ranks have different parameters: on {list_ranks(having)} there is {name!r}, but "
                f"not on {list_ranks(missing)}. Pass the same parameters on every rank."
            )
    raise ValueError(
        "broadcast_parameters: the ranks have the same parameters in different orders, or some of them twice"
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements may share a memory location."""
    last = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= last:
                return True
            last += stride * (length - 1)
    return False


def _write(values: torch.Tensor, target: torch.Tensor, name: str) -> None:
    """Copy ``values`` into ``target``. Several elements of ``target`` may share a memory location.

    Raises:
        ValueError: such elements have different values.
    """
    if not _overlaps(target):
        target.copy_(values)
        return
    narrowed, wanted = target, values
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            narrowed, wanted = narrowed.narrow(dimension, 0, 1), wanted.narrow(dimension, 0, 1)
    narrowed.copy_(wanted)
    if not bool(((target == values) | (target != target) & (values != values)).all()):  # NaN differs from itself
        raise ValueError(
            f"broadcast_parameters: elements of {name!r} share memory on rank {rank()} (it was made by expand() or as a view "
            "that overlaps itself), and the root has different values for them. Pass a .clone() of it."
        )


class _Slot:
    """Replaces a tensor in a pickled state dictionary. The tensor is broadcast separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _replaced(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of ``value``, with ``change`` applied to every object of type ``kind`` in its dictionaries, lists and tuples."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [_replaced(each, kind, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@uncompiled
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast the hyper-parameters and the state of rank ``root_rank``'s optimizer. Every rank must call it.

    Ranks other than the root need no state yet. The state is sent through host memory. Each rank copies it to the devices of
    its parameters. In a process that joins a running elastic job it does nothing before ``hvd.elastic.run``.

    Args:
        optimizer: a ``torch.optim.Optimizer``, also a distributed one. Every rank passes the same parameters in the
            same order.
        root_rank: the global rank whose state is used.
        model: accepted for compatibility.

    Raises:
        ValueError: the optimizer is ``torch.optim.LBFGS``, whose state is not tied to parameters.
        RuntimeError: the root failed to prepare its state, for example because it contains something that cannot be pickled.
            The text contains the reason. The root itself raises that exception.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if keeps_own("hvd.broadcast_optimizer_state()"):
        return
    tensors: list[torch.Tensor] = []

    def taken(tensor: torch.Tensor) -> _Slot:
        check_kind(tensor)
        tensors.append(plain(tensor.detach().cpu()))
        return _Slot(tensor)

    def made(slot: _Slot) -> torch.Tensor:
        tensors.append(torch.empty(slot.shape, dtype=slot.dtype))
        return tensors[-1]

    state = broadcast_made(
        lambda: _replaced(for_all_ranks(optimizer.state_dict()), torch.Tensor, taken),
        root_rank,
        "optimizer_state",
        what="broadcast_optimizer_state",
    )
    if rank() != root_rank:
        state = _replaced(state, _Slot, made)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{number}") for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if rank() != root_rank:
        optimizer.load_state_dict(state)
