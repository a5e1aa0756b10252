"""The arguments of a group's methods. PyTorch accepts several forms of each; here they become one.

An operation gets a list of tensors, or one tensor; and an object of options, or a root, a reduction and a time limit. The
methods accept all forms and all names of arguments that PyTorch's own groups accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

c10d: Any = torch._C._distributed_c10d
"""Has all of PyTorch's classes of options; ``torch.distributed.distributed_c10d`` lacks some in some versions."""
_REDUCTIONS = (dist.ReduceOp, type(dist.ReduceOp.SUM))


class ArgumentError(ValueError, RuntimeError):
    """The arguments of one call on this rank do not fit together. PyTorch's own groups raise RuntimeError."""


def options_of(kind: Any, *given: Any) -> Any:
    """The options of a call as an object of PyTorch's class ``kind``.

    Args:
        given: such an object first; or a root, a reduction, a time limit, each of which may be None, in any order.
    """
    if given[0].__class__ is kind:
        return given[0]
    made = kind()
    for value in given:
        if isinstance(value, timedelta):
            made.timeout = value
        elif isinstance(value, _REDUCTIONS):
            made.reduceOp = value
        elif isinstance(value, int):
            made.rootRank = value
        elif hasattr(value, "timeout"):
            return value  # the options of a similar operation
        elif value is not None:
            raise TypeError(f"{kind.__name__}, a number, a reduction or a time limit is expected, not {value!r}")
    return made


def root_of(what: str, options: Any, size: int) -> int:
    """The root in the options.

    Raises:
        ArgumentError: the group of ``size`` ranks has no such rank.
    """
    root = int(options.rootRank)
    if not 0 <= root < size:
        raise ArgumentError(f"{what}: invalid root rank: {root}. The group has the ranks 0 to {size - 1}")
    return root


def root_tensor_of(what: str, options: Any, tensors: Sequence[torch.Tensor]) -> int:
    """The number of the tensor that the options name, among those of the call.

    Raises:
        ArgumentError: there is no such tensor.
    """
    which = int(options.rootTensor)
    if not 0 <= which < len(tensors):
        raise ArgumentError(f"{what}: invalid root tensor: {which}. The number of tensors is {len(tensors)}")
    return which


def check_peer(what: str, which: str, rank: int, tag: int, size: int) -> None:
    """Check the other rank and the tag of a send or a receive.

    Raises:
        ArgumentError: the group of ``size`` ranks has no such rank, or the tag is negative.
    """
    if not 0 <= rank < size:
        raise ArgumentError(f"{what}: invalid {which} rank: {rank}. The group has the ranks 0 to {size - 1}")
    if tag < 0:
        raise ArgumentError(f"{what}: the tag must not be negative, but is {tag}")


def as_list(tensors: Any, tensor: Any = None) -> list[torch.Tensor]:
    """The tensors of a call as a list.

    Args:
        tensors: a list of tensors, or one tensor.
        tensor: one tensor, under another name of the argument.
    """
    found = tensor if tensors is None else tensors
    return [found] if isinstance(found, torch.Tensor) else list(found or ())


def listed(what: str, tensors: Any, tensor: Any = None, which: str = "tensor") -> list[torch.Tensor]:
    """:func:`as_list` of an operation that takes several tensors.

    Raises:
        ArgumentError: there is no tensor.
    """
    found = as_list(tensors, tensor)
    if not found:
        raise ArgumentError(f"{what}: requires non-empty {which} list")
    return found


def nested(lists: Any, single: Any = None) -> list[list[torch.Tensor]]:
    """A list of lists of tensors. A single list of tensors, under either name, becomes a list of one list."""
    lists = list(lists if lists is not None else single if single is not None else ())
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def only(what: str, which: str, values: Sequence[Any]) -> Any:
    """The one tensor, or the one list of tensors, of an operation that takes no more.

    Raises:
        ArgumentError: there are none, or several.
    """
    if len(values) != 1:
        raise ArgumentError(f"{what}: requires a single-element {which} list, not {len(values)} elements")
    return values[0]


_Part = TypeVar("_Part")


def for_each_rank(what: str, which: str, parts: Sequence[_Part], size: int) -> Sequence[_Part]:
    """``parts``, checked to be one for each rank.

    Raises:
        ArgumentError: there are more or fewer.
    """
    if len(parts) != size:
        raise ArgumentError(
            f"{what}: Incorrect {which} list size {len(parts)}. {which.capitalize()} list size should be {size}, same as "
            "size of the process group"
        )
    return parts


def same_kind(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that several tensors of one call, which are combined, have one layout, one type and one size.

    Raises:
        ArgumentError: they have not.
    """
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout is not first.layout:
            layouts = f"expected {first.layout}, got {tensor.layout}"
            raise ArgumentError(f"{what}: invalid tensor layout at index {index} ({layouts})")
    same_types(what, tensors, first)
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            shapes = f"expected {tuple(first.shape)}, got {tuple(tensor.shape)}"
            raise ArgumentError(f"{what}: invalid tensor size at index {index} ({shapes})")


def equally_many(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check that there is one output for each input.

    Raises:
        ArgumentError: there are more or fewer.
    """
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{what}: requires input/output tensor lists to have the same length, not {len(inputs)} and {len(outputs)}"
        )


def same_types(what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Check that tensors have the type of ``like``.

    Raises:
        ArgumentError: one has another type.
    """
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not like.dtype:
            raise ArgumentError(
                f"{what}: invalid tensor type at index {index} (expected {like.dtype}, got {tensor.dtype})"
            )
