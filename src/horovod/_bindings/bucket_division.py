"""Cuts gradients into buckets, each of which is one request. The same in every binding.

Gradients become ready roughly in the reverse order of the parameters, so buckets are cut from the end. If communication
overlaps with backward, the first two buckets are small, so that communication starts early, and so are the last ones, because
little of backward is left to overlap with them. Every rank must cut in the same way, so the cut depends only on names, shapes,
types and settings that are the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from horovod.common.util import split_list
from horovod.core.lifecycle.context import running
from horovod.observe.call_site import warn

SMALL_BYTES = 1 << 20
OVERLAPPING_BYTES = 16 << 20
ONE_BUCKET = sys.maxsize


def bucket_limit(on_processor: bool) -> int:
    """The size of a bucket in bytes, unless the user has set one; the same on all ranks.

    With cores to spare, on other devices, or between hosts, the communication of early buckets overlaps with the rest of
    backward. If every core of the only host computes, nothing overlaps: two threads that share a core only disturb each other's
    caches. One bucket after backward is faster then (2 ranks on 2 cores: 2 % of a step). A link between hosts needs no core.
    """
    context = running()
    if context.config.bucket_bytes:
        return context.config.bucket_bytes
    return ONE_BUCKET if context.crowded and on_processor and len(set(context.hosts)) == 1 else OVERLAPPING_BYTES


def cut(sizes: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Cut parameters into buckets of one kind and at most ``limit`` bytes each, from the last parameter to the first.

    No bucket but the first two and those of at most :data:`SMALL_BYTES` has more than half of the bytes that are left when it
    is begun, so what is sent at the end of backward is small. If less than :data:`SMALL_BYTES` is left for a third or later
    bucket, it travels with the one before: another message would take longer. A parameter larger than the bound is a bucket of
    its own.

    Args:
        sizes: each parameter's kind, which is the same within a bucket, and its bytes; in order.
        limit: :data:`ONE_BUCKET` for one bucket of each kind.

    Returns:
        The indices of the parameters of each bucket.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int, int]] = {}  # members, their bytes, and how many they may be
    left = sum(size for _, size in sizes)
    for index in reversed(range(len(sizes))):
        kind, size = sizes[index]
        members, filled, bound = filling.get(kind, ([], 0, 0))
        if len(buckets) >= 2 and left < SMALL_BYTES:
            bound = limit
        if not members or filled + size > bound:
            members, filled, bound = [], 0, limit
            if limit != ONE_BUCKET:
                bound = min(limit, SMALL_BYTES if len(buckets) < 2 else max(SMALL_BYTES, left // 2))
            buckets.append(members)
        members.append(index)
        filling[kind] = (members, filled + size, bound)
        left -= size
    return buckets


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """``groups=`` of an optimizer; with a warning the older ``num_groups=``, if only that is given."""
    if num_groups == 0:
        return groups
    warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning)
    return num_groups if groups is None else groups


def check_groups(groups: Any, kind: str, key: Callable[[Any], Hashable]) -> int | list[list[Any]] | None:
    """``groups=`` of an optimizer, checked and copied.

    Args:
        kind: what the lists contain, as the binding calls it.
        key: returns what identifies a member; raises for one that cannot be a member.

    Raises:
        ValueError: neither a positive number nor lists of different members.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError(f"groups should be a non-negative integer or a list of list of {kind}.")
    members = [key(member) for group in groups for member in group]
    if len(set(members)) != len(members):
        what = "parameter" if kind == "torch.Tensor" else "variable"
        raise ValueError(f"A {what} can only appear once in groups.")
    return [list(group) for group in groups]


def cut_by_groups(members: Sequence[Hashable], groups: int | Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """The buckets that the user asked for: a number of buckets, or lists of members; a member of no list is a bucket of its
    own.

    Args:
        members: the keys of all members, in order; groups may contain other keys, too.

    Returns:
        The indices of the members of each bucket. No bucket is empty.
    """
    if isinstance(groups, int):
        return [part for part in split_list(range(len(members)), groups) if part]
    indices = {member: index for index, member in enumerate(members)}
    listed = [[indices.pop(member) for member in group if member in indices] for group in groups]
    return [bucket for bucket in listed if bucket] + [[index] for index in indices.values()]
