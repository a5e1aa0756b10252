"""Divides an optimizer's parameters into buckets. Every rank must get the same buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from horovod._bindings.bucket_division import bucket_limit, cut, cut_by_groups
from horovod.torch.optimizer.buckets import ParameterState


def cut_buckets(
    slots: Sequence[ParameterState], groups: int | Iterable[Iterable[torch.Tensor]] | None = None, limit: int = 0
) -> list[list[ParameterState]]:
    """Divide ``slots``, in the order of the parameters, into buckets.

    Args:
        groups: the user's groups; None: cut by size.
        limit: the largest size of a bucket in bytes; 0: the default of the running generation.
    """
    if groups is not None:
        return by_groups(slots, groups)
    return by_size(slots, limit or bucket_limit(all(slot.parameter.device.type == "cpu" for slot in slots)))


def by_size(slots: Sequence[ParameterState], limit: int) -> list[list[ParameterState]]:
    """Cut ``slots`` (in parameter order) into buckets of one dtype and device and at most ``limit`` bytes, last ones first.

    A parameter larger than the limit is a bucket of its own.
    """
    kinds = [(slot.parameter.dtype, slot.parameter.device) for slot in slots]
    sizes = [slot.parameter.numel() * slot.parameter.element_size() for slot in slots]
    return [[slots[index] for index in bucket] for bucket in cut(list(zip(kinds, sizes, strict=True)), limit)]


def by_groups(
    slots: Sequence[ParameterState], groups: int | Iterable[Iterable[torch.Tensor]]
) -> list[list[ParameterState]]:
    """Divide ``slots`` into the buckets that the user has asked for: a number of buckets, or lists of parameters. Each
    parameter in no list gets a separate bucket.

    A group whose parameters are on several devices becomes one bucket for each device.
    """
    lists = groups if isinstance(groups, int) else [list(group) for group in groups]
    chosen = cut_by_groups([slot.parameter for slot in slots], lists)
    return [bucket for members in chosen for bucket in _by_device([slots[index] for index in members])]


def _by_device(slots: Sequence[ParameterState]) -> list[list[ParameterState]]:
    buckets: dict[torch.device, list[ParameterState]] = {}
    for slot in slots:
        buckets.setdefault(slot.parameter.device, []).append(slot)
    return list(buckets.values())
